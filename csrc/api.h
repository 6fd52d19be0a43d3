// What the Python module may call in the operators' library: the only C++ symbols that the
// library exports. Operators are reached through torch's dispatcher instead.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#define CUDNN_OPS_API __attribute__((visibility("default")))

namespace cudnn_ops::api {

struct CacheInfo {
  int64_t hits, builds, evictions, size, limit;
};

struct Versions {
  std::string torch;         // built against
  int64_t cudnn_headers;     // built against, 91900 for 9.19.0; 0 in a build without cuDNN
  int64_t frontend_headers;  // built against, 13200 for 1.32.0; 0 in a build without cuDNN
  bool with_cuda;            // whether the CUDA kernels are in this build
};

CUDNN_OPS_API Versions versions();

// The plan cache (graph/plan_cache.h). set_cache_limit throws std::invalid_argument.
CUDNN_OPS_API CacheInfo cache_info();
CUDNN_OPS_API void cache_clear();
CUDNN_OPS_API void set_cache_limit(int64_t limit);

// libcudnn (graph/cudnn_library.h). Those that load it throw std::runtime_error if they can't.
CUDNN_OPS_API void set_cudnn_fallback_path(const std::string& path);
CUDNN_OPS_API int64_t cudnn_version();
CUDNN_OPS_API std::string cudnn_path();
CUDNN_OPS_API std::string describe_device(int index);

}  // namespace cudnn_ops::api
