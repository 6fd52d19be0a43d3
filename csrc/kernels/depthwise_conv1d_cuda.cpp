#include "kernels/depthwise_conv1d.h"

#include "depthwise_conv1d_images.h"
#include "depthwise_conv1d_rows_images.h"
#include "kernels/depthwise_conv1d_call.h"
#include "kernels/device_kernel.h"

#include <ATen/cuda/EmptyTensor.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace cudnn_ops {
namespace {

using namespace depthwise;

constexpr int64_t kThreads = 256, kWarp = 32, kStrip = 32, kMostRows = 65535;
// Threads to a row at least: more than one sample's sums meet in a warp.
constexpr int64_t kLeastLanes = 4;
// What a thread loads of its channels at once.
constexpr int64_t kVectorBytes = 8;
// What it loads of a row at once: kUnit of depthwise_conv1d_rows.cu.
constexpr int64_t kUnitBytes = 16;

// Of one channel a thread, of several; of rows, and of those with a stride.
enum Kind : size_t { kChannel, kChannels, kRows, kStridedRows };

struct TypeKernels {
  // By their kind.
  DeviceKernel forward[4], weight[4];
  DeviceKernel input, input_rows, add_up;
};

const TypeKernels& kernels_of(at::ScalarType dtype) {
#define CUDNN_OPS_KERNEL(name) {kDepthwiseConv1dImages, "depthwise_conv1d_" name}
#define CUDNN_OPS_ROWS(name) {kDepthwiseConv1dRowsImages, "depthwise_conv1d_" name}
#define CUDNN_OPS_KERNELS(type, width)                                                            \
  {                                                                                               \
    {CUDNN_OPS_KERNEL(type "_1"), CUDNN_OPS_KERNEL(type "_" width), CUDNN_OPS_ROWS("rows_" type), \
     CUDNN_OPS_ROWS("strided_rows_" type)},                                                       \
        {CUDNN_OPS_KERNEL("weight_" type "_1"), CUDNN_OPS_KERNEL("weight_" type "_" width),       \
         CUDNN_OPS_ROWS("weight_rows_" type), CUDNN_OPS_ROWS("weight_strided_rows_" type)},       \
        CUDNN_OPS_KERNEL("input_" type), CUDNN_OPS_KERNEL("input_rows_" type),                    \
        CUDNN_OPS_KERNEL("add_up_" type)                                                          \
  }
  static const TypeKernels all[3] = {CUDNN_OPS_KERNELS("half", "4"),
                                     CUDNN_OPS_KERNELS("bfloat16", "4"),
                                     CUDNN_OPS_KERNELS("float", "2")};
#undef CUDNN_OPS_KERNELS
#undef CUDNN_OPS_ROWS
#undef CUDNN_OPS_KERNEL
  return all[type_index(dtype)];
}

bool is_aligned(const void* address, int64_t bytes = kVectorBytes) {
  return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) == 0;
}

DepthwiseConv1dShape shape_of(const at::Tensor& input, const at::Tensor& out, int64_t taps,
                              const DepthwiseSteps& steps) {
  DepthwiseConv1dShape shape{};
  shape.batch = input.size(0);
  shape.length = static_cast<int>(input.size(-1));
  shape.out_length = static_cast<int>(out.size(-1));
  shape.channels = static_cast<int>(input.size(1));
  shape.taps = static_cast<int>(taps);
  shape.stride = static_cast<int>(steps.stride);
  shape.dilation = static_cast<int>(steps.dilation);
  shape.padding = static_cast<int>(steps.padding);
  return shape;
}

// How a call is spread over blocks.
struct Tiling {
  int pieces, threads;  // of the channels, or to a row; of a block
  int64_t blocks;       // with the same outputs of other channels or rows
  int64_t most_rows;    // further blocks, at most as many as there is work for
  int shared_bytes = 0;
};

// Pieces of `width` channels; a thread has `outputs` outputs in a row.
Tiling tile_channels(const DepthwiseConv1dShape& shape, int64_t width, int64_t outputs) {
  const int64_t all = shape.channels / width, pieces = std::min(all, kWarp);
  const int64_t rows = kThreads / pieces;
  const int64_t runs = shape.batch * divide_up(shape.out_length, outputs);
  return {static_cast<int>(pieces), static_cast<int>(pieces * rows), divide_up(all, pieces),
          std::min(divide_up(runs, rows), kMostRows)};
}

// The same for the gradient of the weight, which threads of a block add up.
Tiling tile_channels_of_weight(const DepthwiseConv1dShape& shape, int64_t width) {
  Tiling tiling = tile_channels(shape, width, kStretch);
  tiling.shared_bytes = tiling.threads * static_cast<int>(width * sizeof(float));
  return tiling;
}

// Threads to a row that has a run for each. A run begins where one of the row's vectors does, so
// that a row that does not begin with one may have one run more.
int64_t runs_of(const at::Tensor& rows) {
  const int64_t bytes = static_cast<int64_t>(rows.element_size()), unit = kUnitBytes / bytes;
  const bool begins_with_unit =
      is_aligned(rows.const_data_ptr(), kUnitBytes) && rows.size(-1) % unit == 0;
  return divide_up(rows.size(-1) + (begins_with_unit ? 0 : unit - 1), kRun);
}

// How many samples a thread has, one after another, so that what it finds out once serves all of
// them, and all processors stay busy.
int64_t samples_of(const DepthwiseConv1dShape& shape, int64_t threads, const DeviceKernel& kernel) {
  constexpr int64_t kMost = 8, kWaves = 4;
  const int64_t resident = kThreads * kernel.resident_blocks(kThreads, 0);
  const int64_t each = std::clamp<int64_t>(shape.batch * threads / (kWaves * resident), 1, kMost);
  return std::max(each, divide_up(shape.batch, kMostRows));
}

// Rows of float32 wait for memory: one after another took 1.3 times as long as all at once.
Tiling tile_rows(const DepthwiseConv1dShape& shape, int64_t runs, at::ScalarType dtype,
                 const DeviceKernel& kernel) {
  const int64_t threads = runs * shape.channels;
  const int64_t each =
      dtype == at::kFloat ? divide_up(shape.batch, kMostRows) : samples_of(shape, threads, kernel);
  return {static_cast<int>(runs), static_cast<int>(kThreads), divide_up(threads, kThreads),
          divide_up(shape.batch, each)};
}

Tiling tile_rows_of_weight(const DepthwiseConv1dShape& shape, int64_t runs) {
  return {static_cast<int>(runs), static_cast<int>(kThreads), shape.channels,
          std::min(divide_up(shape.batch * runs, kThreads), kMostRows)};
}

// As many threads to a row, a power of two, as its outputs keep busy with kRun each.
int64_t lanes_of(const DepthwiseConv1dShape& shape) {
  int64_t lanes = kLeastLanes;
  while (lanes < kThreads && lanes * kRun < shape.out_length) lanes *= 2;
  return lanes;
}

Tiling tile_strided_rows(const DepthwiseConv1dShape& shape) {
  const int64_t lanes = lanes_of(shape);
  return {static_cast<int>(lanes), static_cast<int>(kThreads),
          divide_up(shape.batch * shape.channels, kThreads / lanes),
          std::min(divide_up(shape.out_length, lanes * kRun), kMostRows)};
}

Tiling tile_strided_rows_of_weight(const DepthwiseConv1dShape& shape) {
  const int64_t lanes = lanes_of(shape), chunks = divide_up(shape.out_length, kChunk);
  return {static_cast<int>(lanes), static_cast<int>(kThreads), shape.channels,
          std::min(divide_up(shape.batch * chunks, kThreads / lanes), kMostRows)};
}

// Which kernel, and how many channels a thread of it has.
std::pair<Kind, int64_t> kind_of(const at::Tensor& input, const DepthwiseSteps& steps,
                                 bool is_aligned) {
  if (steps.is_length_last) return {steps.stride == 1 ? kRows : kStridedRows, 1};
  const int64_t width = kVectorBytes / static_cast<int64_t>(input.element_size());
  const bool has_vectors = is_aligned && input.size(1) % width == 0;
  return has_vectors ? std::pair{kChannels, width} : std::pair{kChannel, int64_t{1}};
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
  const auto [kind, width] =
      kind_of(input, steps,
              is_aligned(call.input) && is_aligned(call.bias) && is_aligned(call.residual) &&
                  is_aligned(call.before) && is_aligned(call.out));
  call.shape = shape_of(input, out, weight.numel() / input.size(1), steps);
  const auto& kernel = kernels_of(input.scalar_type()).forward[kind];
  const Tiling tiling = kind == kRows
                            ? tile_rows(call.shape, runs_of(out), input.scalar_type(), kernel)
                        : kind == kStridedRows ? tile_strided_rows(call.shape)
                                               : tile_channels(call.shape, width, kRun);
  call.shape.pieces = tiling.pieces;
  void* argument = &call;
  kernel.launch(tiling.blocks, static_cast<int>(tiling.most_rows), tiling.threads, &argument,
                tiling.shared_bytes);
}

void depthwise_conv1d_input(const at::Tensor& grad_out, const at::Tensor& weight,
                            const DepthwiseSteps& steps, const at::Tensor& grad_input) {
  DepthwiseConv1dCall call{};
  call.input = grad_out.const_data_ptr();
  call.weight = weight.const_data_ptr();
  call.out = grad_input.mutable_data_ptr();
  call.shape = shape_of(grad_input, grad_out, weight.numel() / grad_out.size(1), steps);
  const int64_t common = std::gcd(steps.stride, steps.dilation);
  call.shape.pieces = static_cast<int>(steps.stride / common);
  call.shape.back = static_cast<int>(steps.dilation / common);
  const int64_t threads = int64_t{call.shape.length} * call.shape.channels;
  const auto& kernels = kernels_of(grad_out.scalar_type());
  const auto& kernel = steps.is_length_last ? kernels.input_rows : kernels.input;
  const int64_t each = samples_of(call.shape, threads, kernel);
  void* argument = &call;
  kernel.launch(divide_up(threads, kThreads), static_cast<int>(divide_up(call.shape.batch, each)),
                kThreads, &argument);
}

void depthwise_conv1d_weight(const at::Tensor& input, const at::Tensor& grad_out,
                             const DepthwiseSteps& steps, const at::Tensor& grad_weight) {
  DepthwiseConv1dWeightCall call{};
  call.input = input.const_data_ptr();
  call.grad_out = grad_out.const_data_ptr();
  call.grad_weight = grad_weight.mutable_data_ptr();
  const auto [kind, width] =
      kind_of(input, steps, is_aligned(call.input) && is_aligned(call.grad_out));
  call.shape = shape_of(input, grad_out, grad_weight.numel() / input.size(1), steps);
  const Tiling tiling = kind == kRows          ? tile_rows_of_weight(call.shape, runs_of(grad_out))
                        : kind == kStridedRows ? tile_strided_rows_of_weight(call.shape)
                                               : tile_channels_of_weight(call.shape, width);
  call.shape.pieces = tiling.pieces;
  const auto& kernels = kernels_of(input.scalar_type());
  const auto& kernel = kernels.weight[kind];
  const int64_t tiles = tiling.blocks * divide_up(call.shape.taps, kTaps);
  const int64_t resident = kernel.resident_blocks(tiling.threads, tiling.shared_bytes);
  const int64_t blocks = std::min(tiling.most_rows, std::max<int64_t>(1, resident / tiles));
  const int64_t columns = grad_weight.numel();
  at::Tensor partial;
  if (blocks > 1) {
    partial = at::detail::empty_cuda({blocks * columns}, at::kFloat, input.device(), std::nullopt);
    call.partial = static_cast<float*>(partial.mutable_data_ptr());
  }
  call.partials = static_cast<unsigned>(blocks);
  void* argument = &call;
  kernel.launch(tiles, static_cast<int>(blocks), tiling.threads, &argument, tiling.shared_bytes);
  if (blocks > 1) kernels.add_up.launch(divide_up(columns, kStrip), 1, 1024, &argument);
}

}  // namespace cudnn_ops
