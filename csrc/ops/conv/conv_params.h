// What a plan of a convolution bakes in: its key.
#pragma once

#include "graph/fields.h"
#include "graph/tensor_desc.h"
#include "kernels/activation.h"

namespace cudnn_ops {

// ConvGeometry as cuDNN has it: two or three dimensions, the groups in the weight's size. Two
// dimensions have the first two numbers.
struct ConvSteps {
  int64_t dims = 2;
  std::array<int64_t, 3> stride{}, before{}, after{}, dilation{};
  CUDNN_OPS_FIELDS(dims, stride, before, after, dilation)
};

// Tensors have their channels last; the bias is [1, K, 1, 1]. A tensor of rank 0 is absent. The
// steps of a transposed convolution are those of the convolution from `out` to `input`.
struct ConvParams {
  static constexpr const char* kName = "conv";
  graph::TensorDesc input, weight, bias, residual, before, out;
  ConvSteps steps;
  Activation activation = Activation::kNone;
  bool is_transposed = false;
  bool allow_tf32 = false, deterministic = false;
  CUDNN_OPS_FIELDS(input, weight, bias, residual, before, out, steps, activation, is_transposed,
                   allow_tf32, deterministic)
};

// The gradient of the input or that of the weight, from that of the convolution's result.
struct ConvBackwardParams {
  static constexpr const char* kName = "conv_backward";
  graph::TensorDesc input, weight, grad;
  ConvSteps steps;
  bool is_of_weight = false;
  bool allow_tf32 = false, deterministic = false;
  CUDNN_OPS_FIELDS(input, weight, grad, steps, is_of_weight, allow_tf32, deterministic)
};

}  // namespace cudnn_ops
