// The plans that a call needs, from its arguments, and whether it may have any. Nothing here needs
// a GPU.
#pragma once

#include "ops/batch_norm/batch_norm.h"
#include "ops/batch_norm/batch_norm_params.h"

#include <string_view>

namespace cudnn_ops {

// Why no plan of cuDNN computes the norm of this input or its gradient, in words for users; empty
// where one may.
std::string_view reason_without_plan(const at::Tensor& input, bool training);
// Likewise the norm with what comes behind it.
std::string_view reason_without_plan(const BatchNorm& args, bool training);

// Whether a plan goes through the ReLU of a backward by itself, from a mask of bits.
bool takes_mask(const at::Tensor& input);

BatchNormParams batch_norm_params(const BatchNorm& args);
BatchNormBackwardParams batch_norm_backward_params(const at::Tensor& input, bool has_mask,
                                                   bool has_masked);

}  // namespace cudnn_ops
