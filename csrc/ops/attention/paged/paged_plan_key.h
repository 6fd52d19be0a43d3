// Which plan a call would need: for what asks, warms up or tunes.
#pragma once

#include "ops/attention/paged/paged.h"

#include <vector>

namespace cudnn_ops {

// Tensors on the meta device do: only their sizes, strides and dtypes are read.
struct PagedPlanRequest {
  Paged args;
  bool with_lse = false;
  CUDNN_OPS_FIELDS(args, with_lse)
};

std::vector<int64_t> paged_plan_key(const PagedPlanRequest& request);

}  // namespace cudnn_ops
