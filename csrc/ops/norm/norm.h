// Layer norm and RMS norm: what their files share. See cudnn_ops/ops/norm.py for the meaning of the
// arguments.
#pragma once

#include "ops/operator.h"

#include <ATen/core/DimVector.h>

#include <array>

namespace cudnn_ops {

// In the order of the schema of cudnn_ops::_norm_check.
struct Norm {
  at::Tensor input;
  OptionalTensor residual;  // the norm is of the sum of both
  at::SymDimVector normalized_shape;
  OptionalTensor weight, bias;
  double eps = 0;
  bool is_layer = false;       // subtracts the mean, and may have a bias; else RMS norm
  bool zero_centered = false;  // multiplies by 1 + weight
  CUDNN_OPS_FIELDS(input, residual, normalized_shape, weight, bias, eps, is_layer, zero_centered)
};

// cudnn_ops::_norm.
struct NormForward {
  Norm norm;
  bool with_stats = false;
  CUDNN_OPS_FIELDS(norm, with_stats)
};

// What the backward reads of the forward; `input` is the sum where there was a residual.
struct NormSaved {
  at::Tensor input;
  at::SymDimVector normalized_shape;
  OptionalTensor weight;
  at::Tensor mean, rstd;
  bool is_layer = false, zero_centered = false;
  CUDNN_OPS_FIELDS(input, normalized_shape, weight, mean, rstd, is_layer, zero_centered)
  // The forward, as far as it is known.
  Norm norm() const {
    return {input, {}, normalized_shape, weight, {}, 0, is_layer, zero_centered};
  }
};

// cudnn_ops::_norm_backward.
struct NormBackward {
  at::Tensor grad_out;
  OptionalTensor grad_sum;  // becomes part of the gradient of the input
  NormSaved saved;
  std::array<bool, 3> output_mask{};
  CUDNN_OPS_FIELDS(grad_out, grad_sum, saved, output_mask)
};

// The output, the sum, and what the backward needs of each row, mean and 1 / deviation, float32
// [rows] (float64 for float64 inputs); RMS norm has no mean. [0] where nobody asks for it.
using NormResults = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
// Of input, weight and bias; [0] where nobody asks for it.
using NormGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// The public operators.
at::Tensor rms_norm(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                    const OptionalTensor& weight, std::optional<double> eps, bool zero_centered);
at::Tensor layer_norm(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                      const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                      bool zero_centered);
std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& input, const at::Tensor& residual,
                                                c10::SymIntArrayRef normalized_shape,
                                                const OptionalTensor& weight,
                                                std::optional<double> eps, bool zero_centered);
std::tuple<at::Tensor, at::Tensor> add_layer_norm(
    const at::Tensor& input, const at::Tensor& residual, c10::SymIntArrayRef normalized_shape,
    const OptionalTensor& weight, const OptionalTensor& bias, double eps, bool zero_centered);

// The public operator's.
const char* name_of(const Norm& args);
void check_norm(const Norm& args);
void check_norm_backward(const NormBackward& args);

const Operator<NormResults, NormForward>& norm_op();

}  // namespace cudnn_ops
