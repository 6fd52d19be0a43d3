// Adaptive layer norm and RMS norm, with a gated sum before them: what their files share. See
// cudnn_ops/ops/adaptive_norm.py for the meaning of the arguments.
#pragma once

#include "ops/operator.h"

#include <array>

namespace cudnn_ops {

// In the order of the schema of cudnn_ops::_adaptive_norm_check.
struct AdaptiveNorm {
  at::Tensor input;
  OptionalTensor update, gate;  // the norm is of input + gate * update
  OptionalTensor scale, shift;
  OptionalTensor weight, bias;
  double eps = 0;
  bool is_layer = false;  // subtracts the mean, and may have a bias; else RMS norm
  CUDNN_OPS_FIELDS(input, update, gate, scale, shift, weight, bias, eps, is_layer)
};

// cudnn_ops::_adaptive_norm.
struct AdaptiveNormForward {
  AdaptiveNorm norm;
  bool with_stats = false;
  CUDNN_OPS_FIELDS(norm, with_stats)
};

// What the backward reads of the forward; `input` is the sum where there was an update. Of the
// shift it reads no more than what it is like.
struct AdaptiveNormSaved {
  at::Tensor input;
  OptionalTensor update, gate, scale, shift, weight, bias;
  at::Tensor mean, rstd;
  bool is_layer = false;
  CUDNN_OPS_FIELDS(input, update, gate, scale, shift, weight, bias, mean, rstd, is_layer)
  // The forward, as far as it is known.
  AdaptiveNorm norm() const {
    return {input, update, gate, scale, shift, weight, bias, 0, is_layer};
  }
};

// Input, update, gate, scale, shift, weight and bias.
constexpr size_t kAdaptiveNormInputs = 7;

// cudnn_ops::_adaptive_norm_backward.
struct AdaptiveNormBackward {
  at::Tensor grad_out;
  OptionalTensor grad_sum;  // becomes part of the gradient of the sum
  AdaptiveNormSaved saved;
  std::array<bool, kAdaptiveNormInputs> output_mask{};
  CUDNN_OPS_FIELDS(grad_out, grad_sum, saved, output_mask)
};

// The output, the sum, and what the backward needs of each row, mean and 1 / deviation, float32 of
// the input's shape without the last dimension (float64 for float64 inputs); RMS norm has no mean.
// [0] where nobody asks for it.
using AdaptiveNormResults = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
// In the order of the inputs; [0] where nobody asks for it.
using AdaptiveNormGradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// The public operators.
at::Tensor adaptive_layer_norm(const at::Tensor& input, const at::Tensor& scale,
                               const at::Tensor& shift, const OptionalTensor& weight,
                               const OptionalTensor& bias, double eps);
at::Tensor adaptive_rms_norm(const at::Tensor& input, const at::Tensor& scale,
                             const OptionalTensor& shift, const OptionalTensor& weight, double eps);
std::tuple<at::Tensor, at::Tensor> gate_add_adaptive_layer_norm(
    const at::Tensor& input, const at::Tensor& update, const at::Tensor& gate,
    const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& weight,
    const OptionalTensor& bias, double eps);
std::tuple<at::Tensor, at::Tensor> gate_add_adaptive_rms_norm(
    const at::Tensor& input, const at::Tensor& update, const at::Tensor& gate,
    const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& weight,
    double eps);

// The public operator's.
const char* name_of(const AdaptiveNorm& args);
void check_adaptive_norm(const AdaptiveNorm& args);
void check_adaptive_norm_backward(const AdaptiveNormBackward& args);

const Operator<AdaptiveNormResults, AdaptiveNormForward>& adaptive_norm_op();

}  // namespace cudnn_ops
