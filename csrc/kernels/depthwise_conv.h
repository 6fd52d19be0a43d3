// Depthwise convolutions of images and volumes by kernels of our own, the channels last in memory
// (depthwise_conv_forward.cu, depthwise_conv_rolling.cu, depthwise_conv_input.cu,
// depthwise_conv_weight.cu; depthwise_conv_whole.cu, depthwise_conv_whole_weight.cu).
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

// Whether there are kernels for whole images, of the forward and of the gradient of the weight: for
// rows of so many pixels and outputs, as many taps both ways, and so many zeros before a row.
constexpr bool has_whole_kernels(int64_t channels, int64_t pixels, int64_t outputs, int64_t taps,
                                 int64_t stride, int64_t padding) {
  constexpr int64_t kVector = 8;
  const bool is_known = (taps == 3 || taps == 5 || taps == 7) && (stride == 1 || stride == 2);
  return is_known && channels % kVector == 0 && padding == taps / 2 &&
         (outputs == 7 || outputs == 14) && pixels == outputs * stride;
}

// The same for parts of images that are wider: their rows of outputs are nearly all of the rows
// that blocks have, whose threads would else compute what nobody needs.
constexpr bool has_part_kernels(int64_t channels, int64_t outputs, int64_t taps, int64_t stride) {
  constexpr int64_t kVector = 8, kColumns = 14, kMostSpare = 6;
  const int64_t spare = (outputs + kColumns - 1) / kColumns * kColumns - outputs;
  return (taps == 5 || taps == 7) && stride == 1 && channels % kVector == 0 &&
         spare * kMostSpare <= outputs;
}

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
