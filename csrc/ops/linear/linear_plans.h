// The steps of linear layers that cuDNN's graphs run on CUDA: where they were measured to be faster
// than those in linear_steps.h, by the table or by autotune, and for sizes that are called often,
// because a plan serves one number of rows. Where they do not, those run.
#pragma once

#include "ops/linear/linear_steps.h"

namespace cudnn_ops {

// As run_layer(); false, with nothing done, where no plan runs.
bool run_layer_by_plan(const char* op, const LinearStepCall& call);

// As into_hidden(); not defined where no plan runs.
at::Tensor into_hidden_by_plan(const char* op, const at::Tensor& grad_out, const at::Tensor& weight,
                               const OptionalTensor& saved, Activation activation,
                               const at::Tensor& grad_bias);

// Whether a pair of layers keeps the slope of its activation: where that was measured to be faster
// and rows come as often as a plan needs. Counts the call. Of tensors without memory, by which
// torch.compile traces, the measurement alone says it, and sizes that are not known say no.
bool keeps_slope_by_plan(const Mlp& args);

}  // namespace cudnn_ops
