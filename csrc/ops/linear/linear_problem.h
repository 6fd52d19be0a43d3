// The plans that a layer, or the gradient of a hidden one, may have, from its matrices. Nothing
// here needs a GPU.
#pragma once

#include "ops/linear/linear.h"
#include "ops/linear/linear_params.h"

#include <string_view>

namespace cudnn_ops {

// The gradient of a hidden layer from that of the output, grad @ weight, through the activation.
struct HiddenGradient {
  at::Tensor grad, weight;
  Activation activation = Activation::kNone;
  bool with_sum = false;
};

// Why no plan is made for these matrices, whichever is faster, in words for users; empty where one
// may be.
std::string_view reason_for_no_plan(const Linear& args);
std::string_view reason_for_no_plan(const HiddenGradient& args);

// `args` are of matrices. What is kept of the activation is a result too.
LinearParams linear_params(const Linear& args, Keep keep);
HiddenGradientParams hidden_gradient_params(const HiddenGradient& args);

}  // namespace cudnn_ops
