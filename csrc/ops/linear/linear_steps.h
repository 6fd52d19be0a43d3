// The steps that linear layers on CUDA are made of. All matrices are of one dtype and on the
// current device, and have numbers in them; results are contiguous.
#pragma once

#include "ops/linear/linear.h"
#include "ops/linear/linear_choice.h"

namespace cudnn_ops {

// act(input @ weight.T + bias) + residual, into `out`; and what the activation is of, or its slope,
// into `before` if that is defined.
struct LinearStepCall {
  at::Tensor input, weight;
  OptionalTensor bias, residual;
  Activation activation = Activation::kNone;
  at::Tensor out, before;
  bool keeps_slope = false;
  Keep keep() const {
    if (!before.defined()) return Keep::kNothing;
    return keeps_slope ? Keep::kSlope : Keep::kInput;
  }
  LinearStep step() const {
    if (!before.defined()) return LinearStep::kInference;
    return keeps_slope ? LinearStep::kTrainingSlope : LinearStep::kTraining;
  }
};
void run_layer(const LinearStepCall& call);

// The gradient of what the activation is of, from that of its result; and its sum over the rows
// into `grad_bias` if that is defined. `saved`: see needs_before(), or the slope.
at::Tensor through_activation(const at::Tensor& grad_out, const OptionalTensor& saved,
                              Activation activation, const at::Tensor& grad_bias);

// Likewise where that of the result is `grad_out @ weight`.
at::Tensor into_hidden(const at::Tensor& grad_out, const at::Tensor& weight,
                       const OptionalTensor& saved, Activation activation,
                       const at::Tensor& grad_bias);

// grad @ weight, into `grad_input`, as [rows, columns].
void input_gradient(const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& grad_input);

// grad.T @ input into `grad_weight`, and the sum of `grad` over the rows into `grad_bias`: each if
// it is defined.
// Whether the product of the weight's gradient gives that sum too, at no cost of its own.
bool sums_with_weight(const at::Tensor& grad, const at::Tensor& input);
void weight_gradient(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& grad_weight,
                     const at::Tensor& grad_bias);

}  // namespace cudnn_ops
