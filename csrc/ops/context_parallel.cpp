#include "ops/context_parallel.h"

#include <atomic>
#include <utility>

namespace cudnn_ops {
namespace {

std::atomic<bool> is_active{false};
thread_local bool computes_parts = false;

}  // namespace

bool is_context_parallel() {
  return is_active.load(std::memory_order_relaxed) && !computes_parts;
}

void set_context_parallel(bool active) {
  is_active.store(active, std::memory_order_relaxed);
}

bool set_computes_parts(bool computes) {
  return std::exchange(computes_parts, computes);
}

}  // namespace cudnn_ops
