// Running cuDNN's plans of batch norm.
#pragma once

#include "ops/batch_norm/batch_norm_problem.h"

namespace cudnn_ops {

// Images lie densely with their channels last, and their sizes are those that plans have
// (reason_without_plan). False where no plan runs, because the size is not called often or cuDNN
// refuses it; nothing is then written. Tensors that a plan cannot read as they lie are copied.

// The norm in training, without what may follow it; changes the running statistics of `args`.
bool run_batch_norm_plan(const BatchNorm& args, const at::Tensor& out, const at::Tensor& mean,
                         const at::Tensor& rstd);

// Tensors that the backward writes, for channels in float32.
struct BatchNormWritten {
  at::Tensor grad_input, grad_weight, grad_bias;
};

bool run_batch_norm_backward_plan(const BatchNormSaved& saved, const at::Tensor& grad_out,
                                  const BatchNormWritten& written);

}  // namespace cudnn_ops
