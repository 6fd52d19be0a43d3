// Which plan a call would need: for what asks, warms up or tunes.
#pragma once

#include "ops/attention/dense/sdpa.h"

#include <string>
#include <vector>

namespace cudnn_ops {

// Tensors on the meta device do: only their sizes, strides and dtypes are read.
struct SdpaPlanRequest {
  Sdpa args;
  bool with_lse = false, backward = false, grad_mask = false, polymorphic = false;
  CUDNN_OPS_FIELDS(args, with_lse, backward, grad_mask, polymorphic)
};

// The words of the key; without a plan none, and why.
using PlanAnswer = std::tuple<std::vector<int64_t>, std::string>;
PlanAnswer sdpa_plan_key(const SdpaPlanRequest& request);

}  // namespace cudnn_ops
