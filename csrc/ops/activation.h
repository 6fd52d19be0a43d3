// Activations as the arguments of operators: their names, their numbers in schemas, and what torch
// computes them by.
#pragma once

#include "kernels/activation.h"

#include <ATen/core/Tensor.h>

#include <string_view>

namespace cudnn_ops {

// ValueError in the words of `op` where there is none of that name.
Activation activation_of(std::string_view name, const char* op);

// ValueError where there is none of that number.
Activation activation_at(int64_t number);
// Of a gradient, which may be through a slope.
Activation slope_at(int64_t number);

// By torch's operators, which have derivatives.
at::Tensor activate(const at::Tensor& before, Activation activation);

// Likewise the gradient of what the activation is of. `saved` is that, or of ReLU its result, or
// the slope.
at::Tensor activation_gradient(const at::Tensor& grad, const at::Tensor& saved,
                               Activation activation);

}  // namespace cudnn_ops
