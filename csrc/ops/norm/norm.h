// Layer norm and RMS norm: what their files share. See cudnn_ops/ops/norm.py for the meaning of the
// arguments.
#pragma once

#include "ops/attention/dense/sdpa.h"

#include <c10/core/SymInt.h>

#include <array>

namespace cudnn_ops {

// The arguments of a call, in the order of the schema of cudnn_ops::_norm.
struct Norm {
  const at::Tensor& input;
  const OptionalTensor& residual;  // the norm is of the sum of both
  c10::SymIntArrayRef normalized_shape;
  const OptionalTensor &weight, &bias;
  double eps;
  bool is_layer;       // less the mean, and with a bias; else RMS norm
  bool zero_centered;  // the factor is the weight and 1
};

// The output, the sum, and what the backward needs of each row, mean and 1 / deviation, float32
// [rows] (float64 for float64 inputs); of RMS norm no mean. [0] where they are not asked for.
using NormResults = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
// Of input, weight and bias; [0] where they are not asked for.
using NormGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// The public operator's.
const char* name_of(const Norm& args);
void check_norm(const Norm& args);
// And the rest of what the backward is given, for what it is called with is read as it is.
void check_norm_backward(const Norm& args, const at::Tensor& grad_out,
                         const OptionalTensor& grad_sum, const at::Tensor& mean,
                         const at::Tensor& rstd, std::array<bool, 3> output_mask);

using NormOp = NormResults(const at::Tensor& input, const OptionalTensor& residual,
                           c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps, bool is_layer,
                           bool zero_centered, bool with_stats);
// `grad_sum` is that of the sum, which comes as `input`; it becomes part of the input's.
using NormBackwardOp = NormGradients(const at::Tensor& grad_out, const OptionalTensor& grad_sum,
                                     const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                                     const OptionalTensor& weight, const at::Tensor& mean,
                                     const at::Tensor& rstd, bool is_layer, bool zero_centered,
                                     std::array<bool, 3> output_mask);
const c10::TypedOperatorHandle<NormOp>& norm_op();
const c10::TypedOperatorHandle<NormBackwardOp>& norm_backward_op();

}  // namespace cudnn_ops
