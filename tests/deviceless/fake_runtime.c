// A CUDA runtime of GPUs that are not there: memory is addresses that nobody reads, or with
// MEMORY_IS_REAL the host's, and what is launched goes to a callback. Loaded before torch (LD_PRELOAD), it takes the place of libcudart
// and of the driver, as far as operators that launch kernels of ours need them. See launches.py.
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

enum { kMostDevices = 16, kNameSize = 128 };

// What a handle of a kernel points to.
struct Kernel {
  const char* image;
  char name[kNameSize];
};

typedef int (*OnLaunch)(int device, const struct Kernel* kernel, const unsigned* numbers,
                        const void* argument);
typedef int (*OnOccupancy)(int device, const struct Kernel* kernel, int threads, int shared);
typedef void (*OnAllow)(int device, const struct Kernel* kernel, int shared);

static struct cudaDeviceProp devices[kMostDevices];
static int device_count;
static _Thread_local int current_device;
static OnLaunch on_launch;
static OnOccupancy on_occupancy;
static OnAllow on_allow;

void fake_callbacks(OnLaunch launch, OnOccupancy occupancy, OnAllow allow) {
  on_launch = launch;
  on_occupancy = occupancy;
  on_allow = allow;
}

void fake_device(const char* name, int sm_version, int processors, int shared_bytes) {
  struct cudaDeviceProp* device = &devices[device_count++];
  strncpy(device->name, name, sizeof(device->name) - 1);
  device->major = sm_version / 10;
  device->minor = sm_version % 10;
  device->multiProcessorCount = processors;
  device->sharedMemPerBlock = 48 << 10;
  device->sharedMemPerBlockOptin = (size_t)shared_bytes;
  device->warpSize = 32;
  device->maxThreadsPerBlock = 1024;
  device->maxThreadsPerMultiProcessor = 1536;
  device->totalGlobalMem = (size_t)1 << 40;
}

#define SUCCEEDS(name, ...)       \
  cudaError_t name(__VA_ARGS__) { \
    return cudaSuccess;           \
  }
#define GIVES(name, value, type, ...)           \
  cudaError_t name(type* result, __VA_ARGS__) { \
    *result = value;                            \
    return cudaSuccess;                         \
  }
#define GIVES_ONE(name, value, type) \
  cudaError_t name(type* result) {   \
    *result = value;                 \
    return cudaSuccess;              \
  }

GIVES_ONE(cudaGetDeviceCount, device_count, int)
GIVES_ONE(cudaGetDevice, current_device, int)
GIVES_ONE(cudaDriverGetVersion, CUDART_VERSION, int)
GIVES_ONE(cudaRuntimeGetVersion, CUDART_VERSION, int)
GIVES(cudaGetDeviceProperties, devices[index], struct cudaDeviceProp, int index)
SUCCEEDS(cudaGetLastError, void)
SUCCEEDS(cudaPeekAtLastError, void)
SUCCEEDS(cudaDeviceSynchronize, void)
SUCCEEDS(cudaFree, void* memory)
SUCCEEDS(cudaMemcpyAsync, void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind,
         cudaStream_t stream)
SUCCEEDS(cudaLaunchKernel, const void* function, dim3 grid, dim3 block, void** arguments,
         size_t shared, cudaStream_t stream)
SUCCEEDS(__cudaLaunchKernel, const void* function, dim3 grid, dim3 block, void** arguments,
         size_t shared, cudaStream_t stream)

// Whatever is timed takes 1 ms.
GIVES(cudaEventCreateWithFlags, (cudaEvent_t)&devices, cudaEvent_t, unsigned flags)
SUCCEEDS(cudaEventRecord, cudaEvent_t event, cudaStream_t stream)
SUCCEEDS(cudaEventRecordWithFlags, cudaEvent_t event, cudaStream_t stream, unsigned flags)
SUCCEEDS(cudaEventSynchronize, cudaEvent_t event)
SUCCEEDS(cudaEventQuery, cudaEvent_t event)
SUCCEEDS(cudaEventDestroy, cudaEvent_t event)
GIVES(cudaEventElapsedTime, 1, float, cudaEvent_t begin, cudaEvent_t end)

cudaError_t cudaSetDevice(int index) {
  current_device = index;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = 1;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

// A thread that captures a CUDA graph forbids others what is unsafe, unless they are in this mode.
static volatile int is_capturing;
static _Thread_local enum cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

void fake_capture(int is_on) {
  is_capturing = is_on;
}

int fake_allows_all(void) {
  return !is_capturing || capture_mode == cudaStreamCaptureModeRelaxed;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) {
  const enum cudaStreamCaptureMode before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* left, size_t* all) {
  *left = *all = (size_t)1 << 40;
  return cudaSuccess;
}

#ifdef MEMORY_IS_REAL
// Between bytes that nobody may write; never freed, so that they can be looked at in the end.
enum { kGuard = 4096, kUntouched = 0xa5, kMostAllocations = 1 << 20 };
static struct {
  unsigned char* memory;
  size_t bytes;
} allocations[kMostAllocations];
static int allocation_count;

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  const size_t all = (bytes + 511) / 512 * 512 + 2 * kGuard;
  unsigned char* start = aligned_alloc(512, all);
  memset(start, kUntouched, all);
  *memory = start + kGuard;
  memset(*memory, 0xff, bytes);  // NaN of every type
  allocations[allocation_count].memory = start + kGuard;
  allocations[allocation_count++].bytes = bytes;
  return cudaSuccess;
}

// How many allocations have something written around them.
int fake_overruns(void) {
  int count = 0;
  for (int i = 0; i < allocation_count; ++i) {
    int is_touched = 0;
    for (size_t k = 1; k <= kGuard; ++k) {
      is_touched |= allocations[i].memory[-(long)k] != kUntouched ||
                    allocations[i].memory[allocations[i].bytes + k - 1] != kUntouched;
    }
    count += is_touched;
  }
  return count;
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  memset(memory, value, bytes);
  return cudaSuccess;
}
#else
// Never the same twice, and not within reach of any real memory.
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  static size_t next = (size_t)1 << 48;
  *memory = (void*)next;
  next += (bytes | 511) + 1;
  return cudaSuccess;
}

SUCCEEDS(cudaMemsetAsync, void* memory, int value, size_t bytes, cudaStream_t stream)
#endif

cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void* image,
                                enum cudaJitOption* options, void** values, unsigned count,
                                enum cudaLibraryOption* more, void** more_values,
                                unsigned more_count) {
  *library = (cudaLibrary_t)image;
  return cudaSuccess;
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t* result, cudaLibrary_t library, const char* name) {
  struct Kernel* kernel = calloc(1, sizeof(*kernel));
  kernel->image = (const char*)library;
  strncpy(kernel->name, name, kNameSize - 1);
  *result = (cudaKernel_t)kernel;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, enum cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    on_allow(current_device, kernel, value);
  }
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel,
                                                          int threads, size_t shared) {
  *blocks = on_occupancy(current_device, kernel, threads, (int)shared);
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* kernel,
                                           const cudaLaunchConfig_t* config) {
  const unsigned blocks = config->attrs[0].val.clusterDim.x;
  const int threads = (int)config->blockDim.x, shared = (int)config->dynamicSmemBytes;
  *clusters = on_occupancy(current_device, kernel, threads, shared) *
              devices[current_device].multiProcessorCount / (int)blocks;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** arguments) {
  unsigned is_cooperative = 0, cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute* attribute = &config->attrs[i];
    is_cooperative |= attribute->id == cudaLaunchAttributeCooperative;
    if (attribute->id == cudaLaunchAttributeClusterDimension) cluster = attribute->val.clusterDim.x;
  }
  const unsigned numbers[] = {config->gridDim.x, config->gridDim.y, config->blockDim.x,
                              (unsigned)config->dynamicSmemBytes, is_cooperative, cluster};
  on_launch(current_device, kernel, numbers, arguments[0]);
  return cudaSuccess;
}

// Of the driver: torch asks whether a device is in use.
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return 0;
}
