// Which plan a call would need: for what asks, warms up or tunes.
#pragma once

#include "ops/attention/dense/sdpa_plan_key.h"
#include "ops/attention/fp8/sdpa_fp8.h"

namespace cudnn_ops {

// Tensors on the meta device do: only their sizes, strides and dtypes are read. `sm_major`: of the
// GPU's compute capability.
struct SdpaFp8PlanRequest {
  SdpaFp8 args;
  int64_t sm_major = 0;
  CUDNN_OPS_FIELDS(args, sm_major)
};

PlanAnswer sdpa_fp8_plan_key(const SdpaFp8PlanRequest& request);

}  // namespace cudnn_ops
