// Group norm by kernels of our own (group_norm_forward.cu, group_norm_backward.cu), with a sum
// before it and SiLU behind it.
#pragma once

#include <ATen/core/Tensor.h>

namespace cudnn_ops {

// What a call is given; all on one device, and the input not empty. Tensors of the input's shape
// lie densely in one memory order: channels last, or as they are counted.
struct GroupNormOfImages {
  const char* op;  // begins messages
  const at::Tensor& input;
  const std::optional<at::Tensor>&weight, &bias;  // of the input's dtype or float32
  int64_t groups;
  double eps;
  bool has_silu, is_channels_last;
};

// Writes `out`, and each of the others that is defined: the sum of input and residual, of which the
// norm then is, and what the backward needs of each group. On the current device and stream, as the
// next.
void group_norm_forward(const GroupNormOfImages& args, const at::Tensor& residual,
                        const at::Tensor& out, const at::Tensor& sum, const at::Tensor& mean,
                        const at::Tensor& rstd);

// Writes the gradients that are defined. `grad_sum`, where defined, is added to that of the input.
void group_norm_backward(const GroupNormOfImages& args, const at::Tensor& grad_out,
                         const at::Tensor& grad_sum, const at::Tensor& mean, const at::Tensor& rstd,
                         const at::Tensor& grad_input, const at::Tensor& grad_weight,
                         const at::Tensor& grad_bias);

}  // namespace cudnn_ops
