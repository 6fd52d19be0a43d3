#include "kernels/depthwise_conv1d.h"

#include "depthwise_conv1d_images.h"
#include "kernels/depthwise_conv1d_call.h"
#include "kernels/device_kernel.h"

#include <ATen/cuda/EmptyTensor.h>

#include <algorithm>

namespace cudnn_ops {
namespace {

constexpr int64_t kThreads = 256, kWarp = 32, kStrip = 32, kMostRows = 65535;
// As in depthwise_conv1d.cu.
constexpr int64_t kRun = 8, kTaps = 8, kStretch = 32;
// What a thread loads of its channels at once.
constexpr int64_t kVectorBytes = 8;

struct TypeKernels {
  DeviceKernel forward[2], weight[2];  // of one channel a thread, of several
  DeviceKernel add_up;
};

const TypeKernels& kernels_of(at::ScalarType dtype) {
#define CUDNN_OPS_KERNEL(name) \
  { kDepthwiseConv1dImages, "depthwise_conv1d_" name }
#define CUDNN_OPS_KERNELS(type, width)                                                       \
  {                                                                                          \
    {CUDNN_OPS_KERNEL(type "_1"), CUDNN_OPS_KERNEL(type "_" width)},                         \
        {CUDNN_OPS_KERNEL("weight_" type "_1"), CUDNN_OPS_KERNEL("weight_" type "_" width)}, \
        CUDNN_OPS_KERNEL("add_up_" type)                                                     \
  }
  static const TypeKernels all[3] = {CUDNN_OPS_KERNELS("half", "4"),
                                     CUDNN_OPS_KERNELS("bfloat16", "4"),
                                     CUDNN_OPS_KERNELS("float", "2")};
#undef CUDNN_OPS_KERNELS
#undef CUDNN_OPS_KERNEL
  return all[type_index(dtype)];
}

bool is_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kVectorBytes == 0;
}

int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// How channels are spread over a block's threads; and what is left of a call's shape.
struct Tiling {
  DepthwiseConv1dShape shape{};
  int64_t strips, rows;  // blocks for all channels; runs or stretches of outputs at once

  Tiling(const at::Tensor& input, const at::Tensor& out, int64_t taps, const DepthwiseSteps& steps,
         int64_t width) {
    const int64_t channels = input.size(1), pieces = std::min(channels / width, kWarp);
    shape.batch = input.size(0);
    shape.length = static_cast<int>(input.size(-1));
    shape.out_length = static_cast<int>(out.size(-1));
    shape.channels = static_cast<int>(channels);
    shape.taps = static_cast<int>(taps);
    shape.stride = static_cast<int>(steps.stride);
    shape.dilation = static_cast<int>(steps.dilation);
    shape.padding = static_cast<int>(steps.padding);
    shape.pieces = static_cast<int>(pieces);
    strips = divide_up(channels / width, pieces);
    rows = kThreads / pieces;
  }
  int threads() const {
    return static_cast<int>(shape.pieces * rows);
  }
  // How many blocks of as many outputs a thread there are to share.
  int64_t blocks(int64_t outputs) const {
    return divide_up(shape.batch * divide_up(shape.out_length, outputs), rows);
  }
};

int64_t width_of(const at::Tensor& input, bool is_aligned) {
  const int64_t width = kVectorBytes / static_cast<int64_t>(input.element_size());
  return is_aligned && input.size(1) % width == 0 ? width : 1;
}

}  // namespace

void depthwise_conv1d(const at::Tensor& input, const at::Tensor& weight,
                      const DepthwiseSteps& steps, const std::optional<at::Tensor>& bias,
                      const std::optional<at::Tensor>& residual, Activation activation,
                      const at::Tensor& before, const at::Tensor& out) {
  DepthwiseConv1dCall call{};
  call.input = input.const_data_ptr();
  call.weight = weight.const_data_ptr();
  call.bias = bias ? bias->const_data_ptr() : nullptr;
  call.residual = residual ? residual->const_data_ptr() : nullptr;
  call.before = before.defined() ? before.mutable_data_ptr() : nullptr;
  call.out = out.mutable_data_ptr();
  call.activation = static_cast<int>(activation);
  call.is_turned = steps.is_turned;
  const int64_t width = width_of(input, is_aligned(call.input) && is_aligned(call.bias) &&
                                            is_aligned(call.residual) && is_aligned(call.before) &&
                                            is_aligned(call.out));
  const Tiling tiling(input, out, weight.numel() / input.size(1), steps, width);
  call.shape = tiling.shape;
  const int64_t blocks = std::min(tiling.blocks(kRun), kMostRows);
  void* argument = &call;
  kernels_of(input.scalar_type())
      .forward[width > 1]
      .launch(tiling.strips, static_cast<int>(blocks), tiling.threads(), &argument);
}

void depthwise_conv1d_weight(const at::Tensor& input, const at::Tensor& grad_out,
                             const DepthwiseSteps& steps, const at::Tensor& grad_weight) {
  DepthwiseConv1dWeightCall call{};
  call.input = input.const_data_ptr();
  call.grad_out = grad_out.const_data_ptr();
  call.grad_weight = grad_weight.mutable_data_ptr();
  const int64_t width = width_of(input, is_aligned(call.input) && is_aligned(call.grad_out));
  const Tiling tiling(input, grad_out, grad_weight.numel() / input.size(1), steps, width);
  call.shape = tiling.shape;
  const auto& kernels = kernels_of(input.scalar_type());
  const auto& kernel = kernels.weight[width > 1];
  const int threads = tiling.threads(), shared = threads * static_cast<int>(width * 4);
  const int64_t tiles = tiling.strips * divide_up(call.shape.taps, kTaps);
  const int64_t resident = kernel.resident_blocks(threads, shared);
  const int64_t blocks = std::min(
      {tiling.blocks(kStretch), std::max<int64_t>(1, resident / tiles), kMostRows});
  const int64_t columns = grad_weight.numel();
  const at::Tensor partial =
      at::detail::empty_cuda({blocks * columns}, at::kFloat, input.device(), std::nullopt);
  call.partial = static_cast<float*>(partial.mutable_data_ptr());
  call.partials = static_cast<unsigned>(blocks);
  void* argument = &call;
  kernel.launch(tiles, static_cast<int>(blocks), threads, &argument, shared);
  kernels.add_up.launch(divide_up(columns, kStrip), 1, 1024, &argument);
}

}  // namespace cudnn_ops
