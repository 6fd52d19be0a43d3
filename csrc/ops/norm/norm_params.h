// What a plan of a norm bakes in.
#pragma once

#include "graph/fields.h"
#include "graph/tensor_desc.h"

namespace cudnn_ops {

// Rows that lie one behind the other, [rows, size, 1, 1]; the parameters are [1, size, 1, 1], of
// rank 0 where there are none.
struct NormParams {
  static constexpr const char* kName = "norm";
  graph::TensorDesc input, weight, bias;
  bool is_layer = false, zero_centered = false, with_stats = false;
  CUDNN_OPS_FIELDS(input, weight, bias, is_layer, zero_centered, with_stats)
};

// The backward always has a weight: cuDNN wants one.
struct NormBackwardParams {
  static constexpr const char* kName = "norm_backward";
  graph::TensorDesc input, weight;
  bool is_layer = false, zero_centered = false;
  CUDNN_OPS_FIELDS(input, weight, is_layer, zero_centered)
};

}  // namespace cudnn_ops
