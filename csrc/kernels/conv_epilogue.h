// A convolution's epilogue and its gradient by kernels of our own (conv_epilogue.cu).
#pragma once

#include "ops/conv/conv.h"

namespace cudnn_ops {

// Writes activation(conv + bias + residual) to `out`, and what the activation is of to `before` if
// that is defined. All have the channels last; `conv` may be either of the two that are written.
void conv_epilogue_forward(const at::Tensor& conv, const OptionalTensor& bias,
                           const OptionalTensor& residual, ConvActivation activation,
                           const at::Tensor& before, const at::Tensor& out);

// Writes what is defined: the gradient of what the activation is of, with the channels last as
// `grad_out` has them, and its sum over all but the channels. `saved` may lie otherwise.
void conv_epilogue_backward(const at::Tensor& grad_out, const OptionalTensor& saved,
                            ConvActivation activation, const at::Tensor& grad,
                            const at::Tensor& grad_bias);

}  // namespace cudnn_ops
