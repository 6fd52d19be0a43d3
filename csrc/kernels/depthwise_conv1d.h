// Depthwise convolutions of one dimension by kernels of our own (depthwise_conv1d.cu).
#pragma once

#include "kernels/activation.h"

#include <ATen/core/Tensor.h>

#include <optional>

namespace cudnn_ops {

// Where out[i] finds its inputs: at i * stride - padding + tap * dilation.
struct DepthwiseSteps {
  int64_t stride, dilation, padding;
  bool is_length_last = false;  // in memory, of all tensors; else the channels are
  bool is_turned = false;       // the weight's last tap comes first
};

// Writes activation(conv + bias + residual) to `out`, and the activation's input to `before` if
// that is defined. Input and output are [N, C, L] or [N, C, 1, L]; the weight is C kernels of as
// many taps, densely. On the current device and stream, as the next.
void depthwise_conv1d(const at::Tensor& input, const at::Tensor& weight,
                      const DepthwiseSteps& steps, const std::optional<at::Tensor>& bias,
                      const std::optional<at::Tensor>& residual, Activation activation,
                      const at::Tensor& before, const at::Tensor& out);

// Writes the gradient of the input from that of the output, before its epilogue, where the stride
// is not 1. (Where it is, the convolution of grad_out with the taps turned around is that.)
void depthwise_conv1d_input(const at::Tensor& grad_out, const at::Tensor& weight,
                            const DepthwiseSteps& steps, const at::Tensor& grad_input);

// Writes the gradient of the weight from that of the output, before its epilogue.
void depthwise_conv1d_weight(const at::Tensor& input, const at::Tensor& grad_out,
                             const DepthwiseSteps& steps, const at::Tensor& grad_weight);

}  // namespace cudnn_ops
