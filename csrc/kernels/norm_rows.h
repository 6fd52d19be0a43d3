// Layer norm and RMS norm by kernels of our own (norm_forward.cu, norm_backward.cu): for any number
// of rows, which may lie apart, and with a sum ahead of the norm.
#pragma once

#include "ops/norm/norm.h"

namespace cudnn_ops {

// Writes `out`, and each of the others that is defined: the sum of input and residual, and what the
// backward needs of each row.
void norm_rows(const Norm& args, const at::Tensor& out, const at::Tensor& sum,
               const at::Tensor& mean, const at::Tensor& rstd);

// Writes the gradients that are defined; that of the input has `grad_sum` in it, where defined.
void norm_rows_backward(const Norm& args, const at::Tensor& grad_out, const at::Tensor& grad_sum,
                        const at::Tensor& mean, const at::Tensor& rstd,
                        const at::Tensor& grad_input, const at::Tensor& grad_weight,
                        const at::Tensor& grad_bias);

}  // namespace cudnn_ops
