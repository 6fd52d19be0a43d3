#include "kernels/grouped_conv.h"

#include "grouped_conv_images.h"
#include "kernels/device_kernel.h"
#include "kernels/grouped_conv_call.h"

#include <algorithm>

namespace cudnn_ops {
namespace {

constexpr int64_t kStepChannels = 16, kMostSteps = 4;

#define CUDNN_OPS_KERNEL(suffix, steps) {kGroupedConvImages, "grouped_conv_" #suffix "_" #steps}
#define CUDNN_OPS_KERNELS(suffix)                                                         \
  {CUDNN_OPS_KERNEL(suffix, 1), CUDNN_OPS_KERNEL(suffix, 2), CUDNN_OPS_KERNEL(suffix, 3), \
   CUDNN_OPS_KERNEL(suffix, 4)}

// Bytes of a block: of all stages, or of the results in float32, which take their place.
int shared_bytes(int64_t steps) {
  constexpr int64_t kBytes = 2, kRows = kGroupedConvPixels + kGroupedConvOutputs;
  const int64_t stages =
      kGroupedConvStages * kRows * (steps * kStepChannels + kGroupedConvGap) * kBytes;
  const int64_t results = static_cast<int64_t>(sizeof(float)) * kGroupedConvPixels *
                          (kGroupedConvOutputs + kGroupedConvResultGap);
  return static_cast<int>(std::max(stages, results));
}

}  // namespace

void grouped_conv(const at::Tensor& input, const at::Tensor& weight, const GroupedConvSteps& steps,
                  const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& residual,
                  Activation activation, const at::Tensor& before, const at::Tensor& out) {
  static const DeviceKernel kernels[2][kMostSteps] = {CUDNN_OPS_KERNELS(half),
                                                      CUDNN_OPS_KERNELS(bfloat16)};
  GroupedConvCall call{};
  call.input = input.const_data_ptr();
  call.weight = weight.const_data_ptr();
  call.bias = bias ? bias->const_data_ptr() : nullptr;
  call.residual = residual ? residual->const_data_ptr() : nullptr;
  call.before = before.defined() ? before.mutable_data_ptr() : nullptr;
  call.out = out.mutable_data_ptr();
  call.all_rows = static_cast<unsigned>(out.size(2));
  call.all_columns = static_cast<unsigned>(out.size(3));
  call.in_rows = static_cast<int>(input.size(2));
  call.in_columns = static_cast<int>(input.size(3));
  call.channels = static_cast<unsigned>(input.size(1));
  call.outputs = static_cast<unsigned>(out.size(1));
  call.width = static_cast<unsigned>(weight.size(1));
  const int64_t groups = input.size(1) / weight.size(1);
  call.out_width = static_cast<unsigned>(out.size(1) / groups);
  unsigned counts[2];
  for (size_t dim = 0; dim < 2; ++dim) {
    const auto at = static_cast<int64_t>(dim) + 2;
    const auto count_of = [at](const at::Tensor& of, int64_t first, int64_t step) {
      return static_cast<unsigned>(std::max<int64_t>(divide_up(of.size(at) - first, step), 0));
    };
    counts[dim] = count_of(out, steps.out_first[dim], steps.out_step[dim]);
    call.taps[dim] = count_of(weight, steps.tap_first[dim], steps.tap_step[dim]);
    call.out_first[dim] = static_cast<unsigned>(steps.out_first[dim]);
    call.out_step[dim] = static_cast<unsigned>(steps.out_step[dim]);
    call.tap_first[dim] = static_cast<unsigned>(steps.tap_first[dim]);
    call.tap_step[dim] = static_cast<unsigned>(steps.tap_step[dim]);
    call.stride[dim] = static_cast<unsigned>(steps.stride[dim]);
    call.dilation[dim] = static_cast<int>(steps.dilation[dim]);
    call.padding[dim] = static_cast<int>(steps.padding[dim]);
  }
  call.rows = counts[0];
  call.columns = counts[1];
  call.pixels = out.size(0) * counts[0] * counts[1];
  if (call.pixels == 0) return;
  call.all_taps = static_cast<unsigned>(weight.size(2) * weight.size(3));
  call.taps_of_row = static_cast<unsigned>(weight.size(3));
  call.activation = static_cast<int>(activation);
  const int64_t steps_of_channels = std::min(divide_up(weight.size(1), kStepChannels), kMostSteps);
  const DeviceKernel& kernel = kernels[type_index(out.scalar_type())][steps_of_channels - 1];
  void* argument = &call;
  kernel.launch(divide_up(call.pixels, kGroupedConvPixels),
                static_cast<int>(groups * divide_up(call.out_width, kGroupedConvOutputs)),
                kGroupedConvThreads, &argument, shared_bytes(steps_of_channels));
}

}  // namespace cudnn_ops
