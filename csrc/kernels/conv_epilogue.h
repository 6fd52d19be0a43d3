// A product's epilogue, that of a convolution or of a matrix product, and its gradient by kernels
// of our own (conv_epilogue.cu).
#pragma once

#include "kernels/activation.h"

#include <ATen/core/Tensor.h>

#include <optional>

namespace cudnn_ops {

// Where the residual is added: to what the activation is of, or to what it gives.
enum class ResidualPlace { kBefore, kAfter };

// What `before` is to hold: what the activation is of, or its slope there.
enum class BeforeHolds { kInput, kSlope };

// Writes activation(conv + bias + residual) to `out`, and what `holds` says to `before` if that is
// defined. All have the channels last, which rows of a matrix have as they are; `conv` may
// be either of the two that are written. On the current device and stream, as the next.
void conv_epilogue_forward(const at::Tensor& conv, const std::optional<at::Tensor>& bias,
                           const std::optional<at::Tensor>& residual, Activation activation,
                           const at::Tensor& before, const at::Tensor& out,
                           ResidualPlace place = ResidualPlace::kBefore,
                           BeforeHolds holds = BeforeHolds::kInput);

// Writes what is defined: the gradient of the activation's input, and its sum over all but the
// channels. `saved` is the activation's input, or its output, or its slope (Activation::kSlope).
// All have the channels last; `grad` may be `grad_out`.
void conv_epilogue_backward(const at::Tensor& grad_out, const std::optional<at::Tensor>& saved,
                            Activation activation, const at::Tensor& grad,
                            const at::Tensor& grad_bias);

}  // namespace cudnn_ops
