// Makes libraries linked here run on glibc 2.28 too, which manylinux_2_28 promises: what newer ones
// gave another version or place is asked for as old ones have it. Hidden, so that only the library
// that this is linked into does so.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <sys/stat.h>

#if defined(__x86_64__)
#define FIRST "GLIBC_2.2.5"
enum { kStatVersion = 1 };
#elif defined(__aarch64__)
#define FIRST "GLIBC_2.17"
enum { kStatVersion = 0 };
#else
#error "the versions of this architecture's symbols are to be added"
#endif

#define HIDDEN __attribute__((visibility("hidden")))
#define OLD(name) __asm__(".symver old_" #name "," #name "@" FIRST)

OLD(dladdr);
OLD(dlclose);
OLD(dlerror);
OLD(dlopen);
OLD(dlsym);
OLD(log2);
OLD(pthread_once);
OLD(__fxstat);
OLD(__lxstat);
OLD(__xstat);

int old_dladdr(const void* address, Dl_info* info);
int old_dlclose(void* handle);
char* old_dlerror(void);
void* old_dlopen(const char* name, int flags);
void* old_dlsym(void* restrict handle, const char* restrict name);
double old_log2(double x);
int old_pthread_once(pthread_once_t* once, void (*run)(void));
int old___fxstat(int version, int file, struct stat* result);
int old___lxstat(int version, const char* path, struct stat* result);
int old___xstat(int version, const char* path, struct stat* result);

// Read by libstdc++'s headers; 0 is always right.
HIDDEN char __libc_single_threaded = 0;

HIDDEN int dladdr(const void* address, Dl_info* info) {
  return old_dladdr(address, info);
}
HIDDEN int dlclose(void* handle) {
  return old_dlclose(handle);
}
HIDDEN char* dlerror(void) {
  return old_dlerror();
}
HIDDEN void* dlopen(const char* name, int flags) {
  return old_dlopen(name, flags);
}
HIDDEN void* dlsym(void* restrict handle, const char* restrict name) {
  return old_dlsym(handle, name);
}
HIDDEN double log2(double x) {
  return old_log2(x);
}
HIDDEN int pthread_once(pthread_once_t* once, void (*run)(void)) {
  return old_pthread_once(once, run);
}
HIDDEN int fstat(int file, struct stat* result) {
  return old___fxstat(kStatVersion, file, result);
}
HIDDEN int lstat(const char* restrict path, struct stat* restrict result) {
  return old___lxstat(kStatVersion, path, result);
}
HIDDEN int stat(const char* restrict path, struct stat* restrict result) {
  return old___xstat(kStatVersion, path, result);
}
