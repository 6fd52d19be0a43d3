// Depthwise convolutions of images so small that blocks have whole ones (depthwise_conv_whole.cu,
// depthwise_conv_whole_weight.cu).
#pragma once

#include "kernels/depthwise_conv_call.h"
#include "kernels/device_kernel.h"

#include <optional>

namespace cudnn_ops {

// Launches the kernel that fits an image's convolution with as many taps both ways, an even number
// of channels, and no dilation: of whole images, or of parts of them. False where there is none:
// for strides and rows of other lengths, and memory that cannot be copied in whole vectors.
bool launch_whole(DepthwiseConvCall& call, at::ScalarType dtype);

// A launch of one row of blocks.
struct WholeLaunch {
  const DeviceKernel* kernel;
  int64_t blocks;
  int threads, shared_bytes;
};

// The same for the gradient of the weight, whose sums the caller has memory for: as many as the
// blocks are that have the same channels.
std::optional<WholeLaunch> spread_whole_weight(DepthwiseConvWeightCall& call, at::ScalarType dtype);

}  // namespace cudnn_ops
