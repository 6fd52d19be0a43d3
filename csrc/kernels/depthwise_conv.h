// Depthwise convolutions of images and volumes by kernels of our own, the channels last in memory
// (depthwise_conv_forward.cu, depthwise_conv_rolling.cu, depthwise_conv_input.cu,
// depthwise_conv_weight.cu).
#pragma once

#include "kernels/activation.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

namespace cudnn_ops {

// Where out[i] finds its inputs: at i * stride - padding + tap * dilation, in depth, height and
// width. Images have a depth of 1.
struct DepthwiseConvSteps {
  std::array<int64_t, 3> stride{1, 1, 1}, dilation{1, 1, 1}, padding{};
};

// Writes activation(conv + bias + residual) to `out`, and the activation's input to `before` if
// that is defined. Images are [N, C, (D,) H, W] with the channels last; the weight is C kernels,
// densely. On the current device and stream, as the next.
void depthwise_conv(const at::Tensor& input, const at::Tensor& weight,
                    const DepthwiseConvSteps& steps, const std::optional<at::Tensor>& bias,
                    const std::optional<at::Tensor>& residual, Activation activation,
                    const at::Tensor& before, const at::Tensor& out);

// Writes the gradient of the input from that of the output, before its epilogue.
void depthwise_conv_input(const at::Tensor& grad_out, const at::Tensor& weight,
                          const DepthwiseConvSteps& steps, const at::Tensor& grad_input);

// Writes the gradient of the weight from that of the output, before its epilogue, and if
// `grad_bias` is defined the bias's.
void depthwise_conv_weight(const at::Tensor& input, const at::Tensor& grad_out,
                           const DepthwiseConvSteps& steps, const at::Tensor& grad_weight,
                           const at::Tensor& grad_bias);

}  // namespace cudnn_ops
