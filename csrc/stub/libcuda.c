// A CUDA driver without a device, for building cuDNN plans on machines that have no driver.
// It must carry the driver's name; cudnn_ops/support/device.py loads it only where there is none.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

enum { kSuccess = 0, kNotFound = 500, kNoDevice = 100, kDriverVersion = 13000 };

// Handed out for code that is loaded but never run.
static int dummy;

int cuDriverGetVersion(int* version) {
  *version = kDriverVersion;
  return kSuccess;
}

#define LOADS(name)         \
  int name(void** handle) { \
    *handle = &dummy;       \
    return kSuccess;        \
  }
#define SUCCEEDS(name) \
  int name(void) {     \
    return kSuccess;   \
  }
#define STUB(name)    \
  int name(void) {    \
    return kNoDevice; \
  }

// The result is the first argument of each of these, whatever follows it.
LOADS(cuLibraryLoadData)
LOADS(cuModuleLoadData)
LOADS(cuModuleLoadDataEx)
LOADS(cuLibraryGetKernel)
LOADS(cuLibraryGetModule)
LOADS(cuModuleGetFunction)
LOADS(cuKernelGetFunction)
SUCCEEDS(cuLibraryUnload)
SUCCEEDS(cuModuleUnload)
SUCCEEDS(cuKernelGetAttribute)
SUCCEEDS(cuKernelSetAttribute)
SUCCEEDS(cuFuncGetAttribute)
SUCCEEDS(cuFuncSetAttribute)

static int look_up(const char* name, void** function, int* status) {
  *function = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name);
  if (status != NULL) *status = *function == NULL ? 1 : 0;
  return *function == NULL ? kNotFound : kSuccess;
}

int cuGetProcAddress(const char* name, void** function, int version, unsigned long long flags) {
  return look_up(name, function, NULL);
}

int cuGetProcAddress_v2(const char* name, void** function, int version, unsigned long long flags,
                        int* status) {
  return look_up(name, function, status);
}

#include "entry_points.inc"
