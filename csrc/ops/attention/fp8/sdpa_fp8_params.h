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

// As SdpaBackwardParams, of a dense log-sum-exp.
struct SdpaFp8BackwardParams : SdpaBackwardParams {
  static constexpr const char* kName = "sdpa_fp8_backward";
  CUDNN_OPS_FIELDS(query, key, value, out, grad_out, grad_query, grad_key, grad_value, mask)
};

}  // namespace cudnn_ops
