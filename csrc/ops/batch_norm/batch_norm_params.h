// What a plan of a batch norm bakes in.
#pragma once

#include "graph/fields.h"
#include "graph/tensor_desc.h"

namespace cudnn_ops {

// Images have their channels last; all that there is one number of for each channel is float32.
// Training alone: cuDNN has no engine that norms by running statistics.
struct BatchNormParams {
  static constexpr const char* kName = "batch_norm";
  graph::TensorDesc input;
  bool has_running = false;
  CUDNN_OPS_FIELDS(input, has_running)
};

struct BatchNormBackwardParams {
  static constexpr const char* kName = "batch_norm_backward";
  graph::TensorDesc input;
  CUDNN_OPS_FIELDS(input)
};

}  // namespace cudnn_ops
