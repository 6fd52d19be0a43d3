#include "graph/cudnn_library.h"

#include "graph/error.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <future>
#include <mutex>
#include <system_error>

// The frontend resolves cuDNN's functions through this handle (its dynamic-loading mode).
namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace cudnn_ops::graph {
namespace {

constexpr const char* kSoname = "libcudnn.so.9";
// What it loads itself for the first graph.
constexpr const char* kLoadedByIt[] = {"libcudnn_graph.so.9", "libcudnn_engines_precompiled.so.9",
                                       "libcudnn_engines_runtime_compiled.so.9",
                                       "libcudnn_heuristic.so.9"};

std::mutex mutex;
std::string fallback_path;

void* open_library() {
  // RTLD_NOLOAD first: whatever copy torch brought is the copy to use, wherever it lies.
  if (void* loaded = dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD)) return loaded;
  if (void* found = dlopen(kSoname, RTLD_NOW)) return found;
  const std::string loader_says = dlerror();
  if (!fallback_path.empty()) {
    if (void* found = dlopen(fallback_path.c_str(), RTLD_NOW | RTLD_GLOBAL)) return found;
  }
  throw CudnnError("no libcudnn could be found: " + loader_says +
                   ". Install it with `pip install nvidia-cudnn-cu13`, or put its folder on "
                   "LD_LIBRARY_PATH");
}

template <class Function>
void resolve(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (function == nullptr) {
    throw CudnnError(std::string(kSoname) + " has no " + name + "; cuDNN 9.8 or newer is needed");
  }
}

CudnnLibrary load() {
  void* handle = open_library();
  CudnnLibrary library{};
  resolve(handle, "cudnnBackendCreateDescriptor", library.create_descriptor);
  resolve(handle, "cudnnBackendDestroyDescriptor", library.destroy_descriptor);
  resolve(handle, "cudnnBackendSetAttribute", library.set_attribute);
  resolve(handle, "cudnnBackendFinalize", library.finalize);
  resolve(handle, "cudnnBackendExecute", library.execute);
  resolve(handle, "cudnnGetErrorString", library.error_string);
  resolve(handle, "cudnnGetLastErrorString", library.last_error_string);
  decltype(&cudnnGetVersion) version = nullptr;
  resolve(handle, "cudnnGetVersion", version);
  library.version = version();
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(version), &info) != 0) library.path = info.dli_fname;
  // The frontend looks for libcudart by name and, where several lie on the path, takes the
  // oldest; the one of these headers is the one that torch runs with.
  const std::string cudart = "libcudart.so." + std::to_string(CUDART_VERSION / 1000);
  setenv("CUDNN_FRONTEND_CUDART_LIB_NAME", cudart.c_str(), /*overwrite=*/0);
  cudnn_frontend::cudnn_dlhandle = handle;
  return library;
}

// What is not there is left to cuDNN, which knows what it needs, and says so.
void load_what_it_loads() {
  try {
    const std::string& path = cudnn().path;
    const std::string folder = path.substr(0, path.rfind('/') + 1);
    for (const char* name : kLoadedByIt) dlopen((folder + name).c_str(), RTLD_NOW);
  } catch (const std::exception&) {
  }
}

std::future<void> loading;

}  // namespace

const CudnnLibrary& cudnn() {
  static std::atomic<const CudnnLibrary*> loaded{nullptr};
  const CudnnLibrary* library = loaded.load(std::memory_order_acquire);
  if (library != nullptr) return *library;
  std::lock_guard<std::mutex> lock(mutex);
  if (loaded.load() == nullptr) loaded = new CudnnLibrary(load());
  return *loaded;
}

std::string version_name(size_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

void load_ahead() {
  static const bool has_begun = [] {
    try {
      loading = std::async(std::launch::async, load_what_it_loads);
    } catch (const std::system_error&) {  // as many threads as there may be
      return false;
    }
    // The child of a fork would have the loader's lock, and no thread to give it back.
    pthread_atfork([] { loading.wait(); }, nullptr, nullptr);
    return true;
  }();
  (void)has_begun;
}

void set_fallback_path(const std::string& path) {
  std::lock_guard<std::mutex> lock(mutex);
  fallback_path = path;
}

}  // namespace cudnn_ops::graph
