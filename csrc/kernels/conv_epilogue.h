// The gradient of a convolution's epilogue by a kernel of our own (conv_epilogue.cu).
#pragma once

#include "../ops/conv.h"

namespace cudnn_ops {

// Writes what is defined: the gradient of what the activation is of, with the channels last as
// `grad_out` has them, and its sum over all but the channels. `saved` may lie otherwise.
void conv_epilogue_backward(const at::Tensor& grad_out, const OptionalTensor& saved,
                            ConvActivation activation, const at::Tensor& grad,
                            const at::Tensor& grad_bias);

}  // namespace cudnn_ops
