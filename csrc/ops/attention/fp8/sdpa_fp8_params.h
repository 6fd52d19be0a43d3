// What a plan of FP8 attention bakes in.
#pragma once

#include "ops/attention/attention_params.h"

namespace cudnn_ops {

// As SdpaForwardParams. The scales lie on the device.
struct SdpaFp8Params {
  static constexpr const char* kName = "sdpa_fp8";
  graph::TensorDesc query, key, value, out;
  SdpaMask mask;
  bool with_lse = false;
  CUDNN_OPS_FIELDS(query, key, value, out, mask, with_lse)
};

}  // namespace cudnn_ops
