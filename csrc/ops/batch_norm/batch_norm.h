// Batch norm, with a sum and an activation behind it: what its files share. See
// cudnn_ops/ops/batch_norm.py for the meaning of the arguments.
#pragma once

#include "kernels/activation.h"
#include "ops/operator.h"

#include <array>

namespace cudnn_ops {

// cudnn_ops::_batch_norm_training, which writes the running statistics, and
// cudnn_ops::_batch_norm_inference, which norms by them.
struct BatchNorm {
  at::Tensor input;
  OptionalTensor running_mean, running_var;
  OptionalTensor weight, bias;
  OptionalTensor residual;  // added to the norm
  double momentum = 0, eps = 0;
  int64_t activation = 0;  // an Activation: none or ReLU
  CUDNN_OPS_FIELDS(input, running_mean, running_var, weight, bias, residual, momentum, eps,
                   activation)
  bool has_relu() const {
    return activation == static_cast<int64_t>(Activation::kRelu);
  }
};

// cudnn_ops::_batch_norm_check.
struct BatchNormCall {
  BatchNorm norm;
  bool training = false;
  CUDNN_OPS_FIELDS(norm, training)
};

// What the backward reads of the forward.
struct BatchNormSaved {
  at::Tensor input;
  OptionalTensor weight;
  OptionalTensor bias;  // where it tells, with all else, the slope of a ReLU: is_relu_of_input()
  OptionalTensor out;   // of any other ReLU
  at::Tensor mean, rstd;
  bool training = false;  // whether these depend on the input
  int64_t activation = 0;
  CUDNN_OPS_FIELDS(input, weight, bias, out, mean, rstd, training, activation)
  bool has_relu() const {
    return activation == static_cast<int64_t>(Activation::kRelu);
  }
};

// cudnn_ops::_batch_norm_backward.
struct BatchNormBackward {
  at::Tensor grad_out;
  BatchNormSaved saved;
  std::array<bool, 4> output_mask{};
  bool params_in_input_dtype = false;  // weight and bias, and so their gradients; else the
                                       // statistics' dtype is theirs
  OptionalTensor grad_more;            // added to grad_out: that of another reader of the output
  CUDNN_OPS_FIELDS(grad_out, saved, output_mask, params_in_input_dtype, grad_more)
};

// The output, and what the backward needs of each channel, mean and 1 / deviation, float32 [C]
// (float64 for float64 inputs), each a tensor of its own.
using BatchNormResults = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
// Of input and residual, in the input's dtype; of weight and bias in that or the statistics'. [0]
// where nobody asks for it.
using BatchNormGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// The public operator.
at::Tensor batch_norm(const at::Tensor& input, const OptionalTensor& running_mean,
                      const OptionalTensor& running_var, const OptionalTensor& weight,
                      const OptionalTensor& bias, bool training, double momentum, double eps,
                      const OptionalTensor& residual, std::string_view activation);

inline constexpr const char* kBatchNorm = "cudnn_ops.batch_norm";

// Whether the backward computes again what a ReLU let pass, in place of reading what it gave.
bool is_relu_of_input(const BatchNorm& args, bool training);

// That of statistics.
inline at::ScalarType stats_dtype(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

void check_batch_norm(const BatchNormCall& args);
void check_batch_norm_backward(const BatchNormBackward& args);

const Operator<BatchNormResults, BatchNorm>& batch_norm_training_op();
const Operator<at::Tensor, BatchNorm>& batch_norm_inference_op();

}  // namespace cudnn_ops
