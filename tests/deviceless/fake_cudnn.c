// A cuDNN for GPUs that are not there: plans are built by the real one, for the GPU that is
// described, and executing them does nothing. Loaded before torch (LD_PRELOAD), beside
// fake_runtime.c, it has the real one's name, and loads that from CUDNN.
//
// With it operators run as they are, from the dispatcher to cuDNN: see fake_cudnn.py.
#define _GNU_SOURCE
#include <cudnn_graph.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

// Of fake_runtime.c: whether this thread may allocate and load code.
extern int fake_allows_all(void);

static void* real;
static cudnnBackendDescriptor_t gpu;
static int handle;  // what all handles point to
static atomic_int is_held, fails, held, finalized, executed, forbidden;
static _Thread_local int finalized_here;
static _Thread_local void* executed_here;

__attribute__((constructor)) static void load(void) {
  real = dlopen(CUDNN, RTLD_NOW | RTLD_GLOBAL);
}

#define REAL(name) ((__typeof__(&name))dlsym(real, #name))

// --- what tests ask and tell ---------------------------------------------------------------

// The GPU of all plans.
void fake_gpu(const char* json) {
  REAL(cudnnBackendCreateDescriptor)(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &gpu);
  REAL(cudnnBackendSetAttribute)(gpu, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
                                 (int64_t)strlen(json), json);
  REAL(cudnnBackendFinalize)(gpu);
}
// Plans are not finished before this is taken back.
void fake_hold(int is_on) {
  is_held = is_on;
}
// Plans cannot be built, for lack of memory.
void fake_fail(int is_on) {
  fails = is_on;
}
// Plans that are held now, that were finished, by all threads and by this one; that were executed.
int fake_held(void) {
  return held;
}
int fake_finalized(void) {
  return finalized;
}
int fake_finalized_here(void) {
  return finalized_here;
}
int fake_executed(void) {
  return executed;
}
// The plan that this thread executed last.
void* fake_executed_here(void) {
  return executed_here;
}
// How many times a thread has built something, or asked for a handle, that another's capture of a
// CUDA graph forbids.
int fake_forbidden(void) {
  return forbidden;
}

// --- cuDNN -----------------------------------------------------------------------------------

enum { kMostDescriptors = 1 << 20 };
static struct {
  cudnnBackendDescriptor_t descriptor;
  cudnnBackendDescriptorType_t type;
} created[kMostDescriptors];
static int created_count;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static cudnnBackendDescriptorType_t type_of(cudnnBackendDescriptor_t descriptor) {
  cudnnBackendDescriptorType_t type = CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR;
  pthread_mutex_lock(&mutex);
  for (int i = created_count - 1; i >= 0; --i) {
    if (created[i].descriptor != descriptor) continue;
    type = created[i].type;
    break;
  }
  pthread_mutex_unlock(&mutex);
  return type;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                           cudnnBackendDescriptor_t* descriptor) {
  const cudnnStatus_t status = REAL(cudnnBackendCreateDescriptor)(type, descriptor);
  if (type != CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR) {
    pthread_mutex_lock(&mutex);
    created[created_count].descriptor = *descriptor;
    created[created_count++].type = type;
    pthread_mutex_unlock(&mutex);
  }
  return status;
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  return REAL(cudnnBackendDestroyDescriptor)(descriptor);
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count,
                                       const void* values) {
  if (type == CUDNN_TYPE_HANDLE) return CUDNN_STATUS_SUCCESS;  // the description takes its place
  return REAL(cudnnBackendSetAttribute)(descriptor, name, type, count, values);
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t descriptor,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t most,
                                       int64_t* count, void* values) {
  return REAL(cudnnBackendGetAttribute)(descriptor, name, type, most, count, values);
}

static void describe(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name) {
  REAL(cudnnBackendSetAttribute)(descriptor, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &gpu);
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
  switch (type_of(descriptor)) {
    case CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR:
      describe(descriptor, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP);
      break;
    case CUDNN_BACKEND_ENGINE_DESCRIPTOR: describe(descriptor, CUDNN_ATTR_ENGINE_DEVICEPROP); break;
    case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR:
      describe(descriptor, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP);
      ++held;
      while (is_held) usleep(1000);
      --held;
      forbidden += !fake_allows_all();
      if (fails) return CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED;
      ++finalized;
      ++finalized_here;
      break;
    default: break;
  }
  return REAL(cudnnBackendFinalize)(descriptor);
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t used, cudnnBackendDescriptor_t plan,
                                  cudnnBackendDescriptor_t pack) {
  ++executed;
  executed_here = plan;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnCreate(cudnnHandle_t* result) {
  forbidden += !fake_allows_all();
  *result = (cudnnHandle_t)&handle;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnDestroy(cudnnHandle_t used) {
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t used, cudaStream_t stream) {
  return CUDNN_STATUS_SUCCESS;
}

size_t cudnnGetVersion(void) {
  return REAL(cudnnGetVersion)();
}

const char* cudnnGetErrorString(cudnnStatus_t status) {
  return REAL(cudnnGetErrorString)(status);
}

void cudnnGetLastErrorString(char* message, size_t size) {
  REAL(cudnnGetLastErrorString)(message, size);
}
