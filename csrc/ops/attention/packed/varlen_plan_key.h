// Which plan a call would need: for what asks, warms up or tunes.
#pragma once

#include "ops/attention/packed/varlen.h"

#include <vector>

namespace cudnn_ops {

// Tensors on the meta device do: only their sizes, strides and dtypes are read. `sm_major`: of the
// GPU's compute capability.
struct VarlenPlanRequest {
  Varlen args;
  bool with_lse = false, backward = false;
  int64_t sm_major = 0;
  CUDNN_OPS_FIELDS(args, with_lse, backward, sm_major)
};

std::vector<int64_t> varlen_plan_key(const VarlenPlanRequest& request);

}  // namespace cudnn_ops
