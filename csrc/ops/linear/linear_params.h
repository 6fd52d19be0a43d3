// What a plan of a linear layer bakes in: its key.
#pragma once

#include "graph/fields.h"
#include "graph/tensor_desc.h"
#include "kernels/activation.h"

namespace cudnn_ops {

// Matrices are a batch of one, [1, rows, columns]; the bias is [1, 1, columns]. A tensor of rank 0
// is absent.
struct LinearParams {
  static constexpr const char* kName = "linear";
  graph::TensorDesc input, weight, bias, residual, before, out;
  Activation activation = Activation::kNone;
  bool keeps_slope = false;  // `before` is the activation's slope, not its input
  CUDNN_OPS_FIELDS(input, weight, bias, residual, before, out, activation, keeps_slope)
};

// The gradient of a hidden layer, grad @ weight, through the activation whose input, or of ReLU
// whose result, or of which the slope, is `saved`; and its sum over the rows, in float32.
struct HiddenGradientParams {
  static constexpr const char* kName = "hidden_gradient";
  graph::TensorDesc grad, weight, saved, sum, out;
  Activation activation = Activation::kNone;
  CUDNN_OPS_FIELDS(grad, weight, saved, sum, out, activation)
};

}  // namespace cudnn_ops
