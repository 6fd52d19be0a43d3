#include "ops/context_parallel.h"

#include <atomic>

namespace cudnn_ops {
namespace {

std::atomic<bool> is_active{false};

}  // namespace

bool is_context_parallel() {
  return is_active.load(std::memory_order_relaxed);
}

void set_context_parallel(bool active) {
  is_active.store(active, std::memory_order_relaxed);
}

}  // namespace cudnn_ops
