#include "api.h"

#include "graph/cudnn_library.h"
#include "graph/plan_cache.h"
#include "graph/target.h"

#include <cudnn_frontend_version.h>
#include <torch/version.h>

namespace cudnn_ops::api {

Versions versions() {
#ifdef CUDNN_OPS_WITH_CUDA
  constexpr bool with_cuda = true;
#else
  constexpr bool with_cuda = false;
#endif
  return {TORCH_VERSION, CUDNN_VERSION, CUDNN_FRONTEND_VERSION, with_cuda};
}

CacheInfo cache_info() {
  const auto info = graph::PlanCache::global().info();
  return {info.hits, info.builds, info.evictions, info.size, info.limit};
}

void cache_clear() {
  graph::PlanCache::global().clear();
}

void set_cache_limit(int64_t limit) {
  graph::PlanCache::global().set_limit(limit);
}

void set_cudnn_fallback_path(const std::string& path) {
  graph::set_fallback_path(path);
}

int64_t cudnn_version() {
  return static_cast<int64_t>(graph::cudnn().version);
}

std::string cudnn_path() {
  return graph::cudnn().path;
}

std::string describe_device(int index) {
  return graph::describe_device(index);
}

}  // namespace cudnn_ops::api
