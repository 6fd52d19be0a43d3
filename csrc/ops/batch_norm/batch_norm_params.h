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
  bool has_running = false, has_residual = false, has_relu = false;
  CUDNN_OPS_FIELDS(input, has_running, has_residual, has_relu)
};

// `has_mask`: the gradient of the output goes through a ReLU, of which a bit for each number tells
// whether it let it pass. `has_masked`: what comes through is a result too, the residual's
// gradient.
struct BatchNormBackwardParams {
  static constexpr const char* kName = "batch_norm_backward";
  graph::TensorDesc input;
  bool has_mask = false, has_masked = false;
  CUDNN_OPS_FIELDS(input, has_mask, has_masked)
};

}  // namespace cudnn_ops
