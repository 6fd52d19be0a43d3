// Layer norm and RMS norm by kernels of our own (norm_forward.cu, norm_backward.cu): any number of
// rows, which may be apart in memory, and a sum before the norm.
#pragma once

#include <ATen/core/Tensor.h>

namespace cudnn_ops {

// What a call is given; all on one device, and the input not empty.
struct NormOfRows {
  const char* op;  // begins messages
  const at::Tensor& input;
  const std::optional<at::Tensor>& residual;      // the norm is of the sum of both
  const std::optional<at::Tensor>&weight, &bias;  // of the input's dtype or float32
  int64_t row_dims;                               // the leading dimensions that count rows
  double eps;
  bool is_layer, zero_centered;
};

// Writes `out`, and each of the others that is defined: the sum of input and residual, and what the
// backward needs of each row. On the current device and stream, as the next.
void norm_rows(const NormOfRows& args, const at::Tensor& out, const at::Tensor& sum,
               const at::Tensor& mean, const at::Tensor& rstd);

// Writes the gradients that are defined. `grad_sum`, where defined, is added to that of the input.
void norm_rows_backward(const NormOfRows& args, const at::Tensor& grad_out,
                        const at::Tensor& grad_sum, const at::Tensor& mean, const at::Tensor& rstd,
                        const at::Tensor& grad_input, const at::Tensor& grad_weight,
                        const at::Tensor& grad_bias);

}  // namespace cudnn_ops
