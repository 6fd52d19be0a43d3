// Convolutions of images in groups by a kernel of our own, on tensor cores, the channels last in
// memory (grouped_conv.cu).
#pragma once

#include "kernels/activation.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

namespace cudnn_ops {

// Where out[i] finds its inputs: at i * stride - padding + tap * dilation, in height and width.
// Where only each `out_step`-th output is computed and each `tap_step`-th tap read, from the first
// one on, i and tap count these. Dilation and padding are negative where the gradient of the input
// is computed of the output's.
struct GroupedConvSteps {
  std::array<int64_t, 2> stride{1, 1}, dilation{1, 1}, padding{};
  std::array<int64_t, 2> out_first{}, out_step{1, 1}, tap_first{}, tap_step{1, 1};
};

// What the kernel takes: multiples of so many channels a group, in and out; and counts that fit in
// 32 bits.
constexpr int64_t kGroupedConvChannels = 8;

// Writes activation(conv + bias + residual) to `out`, and the activation's input to `before` if
// that is defined. In half precision; images are [N, C, H, W] with the channels last, the weight is
// [outputs, channels of a group, height, width] likewise, and all lie at multiples of 16 bytes. On
// the current device and stream.
void grouped_conv(const at::Tensor& input, const at::Tensor& weight, const GroupedConvSteps& steps,
                  const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& residual,
                  Activation activation, const at::Tensor& before, const at::Tensor& out);

}  // namespace cudnn_ops
