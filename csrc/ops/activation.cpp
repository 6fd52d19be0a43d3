#include "ops/activation.h"

#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/hardswish_backward.h>
#include <ATen/ops/hardtanh.h>
#include <ATen/ops/hardtanh_backward.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/leaky_relu_backward.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/threshold_backward.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <iterator>

namespace cudnn_ops {

Activation activation_of(std::string_view name, const char* op) {
  const auto* found = std::find(std::begin(kActivations), std::end(kActivations), name);
  TORCH_CHECK_VALUE(found != std::end(kActivations), op, ": activation must be one of ",
                    c10::Join(", ", kActivations), "; got \"", name, "\"");
  return static_cast<Activation>(found - std::begin(kActivations));
}

Activation activation_at(int64_t number) {
  TORCH_CHECK_VALUE(number >= 0 && number < static_cast<int64_t>(std::size(kActivations)),
                    "cudnn_ops: there is no activation ", number);
  return static_cast<Activation>(number);
}

Activation slope_at(int64_t number) {
  return number == static_cast<int64_t>(Activation::kSlope) ? Activation::kSlope
                                                            : activation_at(number);
}

at::Tensor activate(const at::Tensor& before, Activation activation) {
  switch (activation) {
    case Activation::kNone: return before;
    case Activation::kRelu: return at::relu(before);
    case Activation::kSilu: return at::silu(before);
    case Activation::kGelu: return at::gelu(before);
    case Activation::kGeluTanh: return at::gelu(before, "tanh");
    case Activation::kRelu6: return at::hardtanh(before, 0, 6);
    case Activation::kHardSwish: return at::hardswish(before);
    case Activation::kLeakyRelu: return at::leaky_relu(before);
    case Activation::kSlope: break;
  }
  return before;
}

at::Tensor activation_gradient(const at::Tensor& grad, const at::Tensor& saved,
                               Activation activation) {
  constexpr double kLeak = 0.01;  // torch's default
  switch (activation) {
    case Activation::kNone: return grad;
    case Activation::kRelu: return at::threshold_backward(grad, saved, 0);
    case Activation::kSilu: return at::silu_backward(grad, saved);
    case Activation::kGelu: return at::gelu_backward(grad, saved);
    case Activation::kGeluTanh: return at::gelu_backward(grad, saved, "tanh");
    case Activation::kRelu6: return at::hardtanh_backward(grad, saved, 0, 6);
    case Activation::kHardSwish: return at::hardswish_backward(grad, saved);
    case Activation::kLeakyRelu: return at::leaky_relu_backward(grad, saved, kLeak, false);
    case Activation::kSlope: return at::mul(grad, saved);
  }
  return grad;
}

}  // namespace cudnn_ops
