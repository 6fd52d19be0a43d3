#include "kernels/batch_norm.h"

#include "batch_norm_images.h"
#include "kernels/batch_norm_call.h"
#include "kernels/device_kernel.h"
#include "kernels/row_tiling.h"

#include <ATen/cuda/EmptyTensor.h>

#include <algorithm>
#include <iterator>
#include <limits>

namespace cudnn_ops {
namespace {

constexpr int64_t kVectorBytes = 16, kMostStretches = 65535;
constexpr int kPlaneThreads = 256, kSumsThreads = 512, kCopyThreads = 256;
// Pieces of a thread, of a plane.
constexpr int64_t kPlaneTurns = 4;

struct ApplyKernels {
  DeviceKernel pixels_wide, pixels_narrow, planes_wide, planes_narrow;
};

const ApplyKernels& kernels_of(at::ScalarType dtype) {
  static const ApplyKernels all[3] = {{{kBatchNormImages, "batch_norm_pixels_half_8", true},
                                       {kBatchNormImages, "batch_norm_pixels_half_1", true},
                                       {kBatchNormImages, "batch_norm_planes_half_8", true},
                                       {kBatchNormImages, "batch_norm_planes_half_1", true}},
                                      {{kBatchNormImages, "batch_norm_pixels_bfloat16_8", true},
                                       {kBatchNormImages, "batch_norm_pixels_bfloat16_1", true},
                                       {kBatchNormImages, "batch_norm_planes_bfloat16_8", true},
                                       {kBatchNormImages, "batch_norm_planes_bfloat16_1", true}},
                                      {{kBatchNormImages, "batch_norm_pixels_float_4", true},
                                       {kBatchNormImages, "batch_norm_pixels_float_1", true},
                                       {kBatchNormImages, "batch_norm_planes_float_4", true},
                                       {kBatchNormImages, "batch_norm_planes_float_1", true}}};
  return all[type_index(dtype)];
}

BatchNormVector vector_of(const at::Tensor& vector) {
  if (!vector.defined()) return {nullptr, false};
  return {vector.const_data_ptr(), vector.scalar_type() == at::kFloat};
}

BatchNormVector vector_of(const std::optional<at::Tensor>& vector) {
  return vector_of(vector ? *vector : at::Tensor());
}

bool is_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kVectorBytes == 0;
}

void launch(BatchNormApplyCall& call, bool is_channels_last, int64_t element,
            const ApplyKernels& kernels) {
  const int64_t columns = is_channels_last ? call.channels : call.positions;
  const bool is_wide = columns * element % kVectorBytes == 0 && is_aligned(call.input) &&
                       is_aligned(call.residual) && is_aligned(call.out);
  const int64_t width = is_wide ? kVectorBytes / element : 1;
  void* argument = &call;
  if (is_channels_last) {
    const RowTiling tiling(columns, width);
    call.pieces = static_cast<unsigned>(tiling.pieces);
    const auto& kernel = is_wide ? kernels.pixels_wide : kernels.pixels_narrow;
    const int64_t resident = kernel.resident_blocks(tiling.threads, 0);
    const int64_t stretches = tiling.stretches(call.rows, resident, /*least_turns=*/1);
    kernel.launch(tiling.strips, static_cast<int>(stretches), tiling.threads, &argument);
    return;
  }
  constexpr int64_t kWarp = 32;
  const auto& kernel = is_wide ? kernels.planes_wide : kernels.planes_narrow;
  const int64_t pieces = call.positions / width;
  const int64_t threads = std::min<int64_t>(kPlaneThreads, divide_up(pieces, kWarp) * kWarp);
  const int64_t stretches = std::min(kMostStretches, divide_up(pieces, threads * kPlaneTurns));
  const int64_t planes = std::min<int64_t>(call.rows, std::numeric_limits<int32_t>::max());
  kernel.launch(planes, static_cast<int>(stretches), static_cast<int>(threads), &argument);
}

}  // namespace

void batch_norm_apply(const BatchNormOfImages& args, const at::Tensor& out) {
  const auto& input = args.input;
  const int64_t channels = input.size(1);
  BatchNormApplyCall call{};
  call.input = input.const_data_ptr();
  call.residual = args.residual.defined() ? args.residual.const_data_ptr() : nullptr;
  call.out = out.mutable_data_ptr();
  call.mean = vector_of(args.mean);
  call.spread = vector_of(args.spread);
  call.weight = vector_of(args.weight);
  call.bias = vector_of(args.bias);
  call.eps = static_cast<float>(args.eps);
  call.is_variance = args.is_variance;
  call.has_relu = args.has_relu;
  call.channels = static_cast<unsigned>(channels);
  const int64_t planes = input.size(0) * channels;
  call.positions = input.numel() / planes;
  // Of one position both orders are the same, and a plane a single number.
  const bool is_channels_last = args.is_channels_last || call.positions == 1;
  call.rows = is_channels_last ? input.numel() / channels : planes;
  launch(call, is_channels_last, static_cast<int64_t>(input.element_size()),
         kernels_of(input.scalar_type()));
}

void batch_norm_sums(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean,
                     const at::Tensor& sums) {
  static const DeviceKernel kernels[3][2] = {
      {{kBatchNormImages, "batch_norm_sums_half_8"}, {kBatchNormImages, "batch_norm_sums_half_1"}},
      {{kBatchNormImages, "batch_norm_sums_bfloat16_8"},
       {kBatchNormImages, "batch_norm_sums_bfloat16_1"}},
      {{kBatchNormImages, "batch_norm_sums_float_4"},
       {kBatchNormImages, "batch_norm_sums_float_1"}}};
  static const DeviceKernel add_up(kBatchNormImages, "batch_norm_add_up");
  constexpr int64_t kStrip = 32, kTurns = 4;  // columns of a block; pieces of a thread, at least
  BatchNormSumsCall call{};
  call.grad = grad.const_data_ptr();
  call.input = input.const_data_ptr();
  call.mean = mean.const_data_ptr<float>();
  call.sums = call.partial = sums.mutable_data_ptr<float>();
  const int64_t channels = input.size(1);
  call.channels = static_cast<unsigned>(channels);
  call.samples = input.size(0);
  call.positions = input.numel() / (call.samples * channels);
  const auto element = static_cast<int64_t>(input.element_size());
  const bool is_wide = call.positions * element % kVectorBytes == 0 && is_aligned(call.grad) &&
                       is_aligned(call.input);
  const auto& kernel = kernels[type_index(input.scalar_type())][is_wide ? 0 : 1];
  const int64_t pieces = call.samples * call.positions / (is_wide ? kVectorBytes / element : 1);
  const int64_t enough = divide_up(kernel.resident_blocks(kSumsThreads, 0), channels);
  const int64_t stretches =
      std::min({enough, divide_up(pieces, kSumsThreads * kTurns), kMostStretches});
  call.stretches = static_cast<unsigned>(stretches);
  at::Tensor partial;
  if (stretches > 1) {
    partial =
        at::detail::empty_cuda({stretches, 2, channels}, at::kFloat, input.device(), std::nullopt);
    call.partial = partial.mutable_data_ptr<float>();
  }
  void* argument = &call;
  kernel.launch(channels, static_cast<int>(stretches), kSumsThreads, &argument);
  if (stretches > 1) add_up.launch(divide_up(2 * channels, kStrip), 1, 1024, &argument);
}

void batch_norm_copy(c10::ArrayRef<BatchNormCopy> copies) {
  static const DeviceKernel half(kBatchNormImages, "batch_norm_copy_half");
  static const DeviceKernel bfloat16(kBatchNormImages, "batch_norm_copy_bfloat16");
  BatchNormCopyCall call{};
  TORCH_INTERNAL_ASSERT(!copies.empty() && copies.size() <= std::size(call.copies));
  bool is_half = false;
  for (size_t i = 0; i < copies.size(); ++i) {
    const auto& [from, to, otherwise] = copies[i];
    call.copies[i] = {vector_of(from), otherwise, to.mutable_data_ptr(),
                      to.scalar_type() == at::kFloat};
    is_half = is_half || to.scalar_type() == at::kHalf ||
              (from.defined() && from.scalar_type() == at::kHalf);
  }
  call.channels = static_cast<unsigned>(copies.front().to.numel());
  void* argument = &call;
  (is_half ? half : bfloat16)
      .launch(divide_up(call.channels, kCopyThreads), static_cast<int>(copies.size()), kCopyThreads,
              &argument);
}

}  // namespace cudnn_ops
