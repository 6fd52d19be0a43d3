// The plans that a call needs, from its arguments, and whether it may have any. Nothing here needs
// a GPU.
#pragma once

#include "ops/batch_norm/batch_norm.h"
#include "ops/batch_norm/batch_norm_params.h"

#include <string_view>

namespace cudnn_ops {

// Whether kernels of ours (kernels/batch_norm_pixels.h) compute the norm of this input in training
// and its gradient.
bool has_pixel_kernels(const at::Tensor& input);

// Why no plan of cuDNN computes the norm of this input, or its gradient, in words for users; empty
// where one may. `has_more`: a ReLU or a sum follows it.
std::string_view reason_without_plan(const at::Tensor& input, bool training, bool has_more);

BatchNormParams batch_norm_params(const BatchNorm& args);
BatchNormBackwardParams batch_norm_backward_params(const at::Tensor& input);

}  // namespace cudnn_ops
