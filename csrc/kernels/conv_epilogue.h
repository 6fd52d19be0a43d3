// A convolution's epilogue and its gradient by kernels of our own (conv_epilogue.cu), and the
// activations that they have.
#pragma once

#include "kernels/activation_list.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <string_view>

namespace cudnn_ops {

#define CUDNN_OPS_ENUMERATOR(name, Name) k##Name,
enum class ConvActivation : int64_t { CUDNN_OPS_ACTIVATIONS(CUDNN_OPS_ENUMERATOR) };
#undef CUDNN_OPS_ENUMERATOR

// Their names for users, in that order.
#define CUDNN_OPS_NAME(name, Name) std::string_view(#name),
inline constexpr std::array kConvActivations{CUDNN_OPS_ACTIVATIONS(CUDNN_OPS_NAME)};
#undef CUDNN_OPS_NAME

// Writes activation(conv + bias + residual) to `out`, and the activation's input to `before` if
// that is defined. All have the channels last; `conv` may be either of the two that are written.
// On the current device and stream, as the next.
void conv_epilogue_forward(const at::Tensor& conv, const std::optional<at::Tensor>& bias,
                           const std::optional<at::Tensor>& residual, ConvActivation activation,
                           const at::Tensor& before, const at::Tensor& out);

// Writes what is defined: the gradient of the activation's input, and its sum over all but the
// channels. `saved` is the activation's input, or its output. All have the channels last.
void conv_epilogue_backward(const at::Tensor& grad_out, const std::optional<at::Tensor>& saved,
                            ConvActivation activation, const at::Tensor& grad,
                            const at::Tensor& grad_bias);

}  // namespace cudnn_ops
