#include "kernels/depthwise_conv.h"

#include "depthwise_conv_forward_bfloat16_images.h"
#include "depthwise_conv_forward_float_images.h"
#include "depthwise_conv_forward_half_images.h"
#include "depthwise_conv_input_bfloat16_images.h"
#include "depthwise_conv_input_float_images.h"
#include "depthwise_conv_input_half_images.h"
#include "depthwise_conv_rolling_bfloat16_images.h"
#include "depthwise_conv_rolling_float_images.h"
#include "depthwise_conv_rolling_half_images.h"
#include "depthwise_conv_weight_bfloat16_images.h"
#include "depthwise_conv_weight_float_images.h"
#include "depthwise_conv_weight_half_images.h"
#include "kernels/depthwise_conv_call.h"
#include "kernels/depthwise_conv_whole.h"
#include "kernels/device_kernel.h"

#include <ATen/cuda/EmptyTensor.h>

#include <algorithm>
#include <limits>

namespace cudnn_ops {
namespace {

using namespace depthwise_images;

// Threads of a block; of the weight's gradient fewer, which have more registers each.
constexpr int64_t kThreads = 256, kLeastThreads = 64, kWeightThreads = 128;
constexpr int64_t kStrip = 32;
constexpr int kFloatBytes = sizeof(float);

struct TypeKernels {
  // Of three, five and seven taps each way: for strides of 1, of 2, and of either.
  DeviceKernel rolling[3], forward[3], weight[2][3];
  // Of three taps and strides of 1, for four channels of a thread: in half precision alone.
  DeviceKernel wide;
  // For strides of 2.
  DeviceKernel input[3];
  // Of any geometry, by the channels of a thread.
  DeviceKernel forward_any[2], weight_any[2], input_any[2];
  DeviceKernel add_up;
};

#define CUDNN_OPS_KERNEL(images, name) {images, "depthwise_conv_" name}
#define CUDNN_OPS_SIZES(images, name, ending)                                              \
  {CUDNN_OPS_KERNEL(images, name "_3" ending), CUDNN_OPS_KERNEL(images, name "_5" ending), \
   CUDNN_OPS_KERNEL(images, name "_7" ending)}
#define CUDNN_OPS_STRIDES(images, name) \
  {CUDNN_OPS_SIZES(images, name, "_1"), CUDNN_OPS_SIZES(images, name, "_2")}
#define CUDNN_OPS_WIDTHS(images, name) \
  {CUDNN_OPS_KERNEL(images, name "_singles"), CUDNN_OPS_KERNEL(images, name "_pairs")}
#define CUDNN_OPS_KERNELS(Type)                                                          \
  {                                                                                      \
    CUDNN_OPS_SIZES(kDepthwiseConvRolling##Type##Images, "rolling", ""),                 \
        CUDNN_OPS_SIZES(kDepthwiseConvForward##Type##Images, "forward", "_2"),           \
        CUDNN_OPS_STRIDES(kDepthwiseConvWeight##Type##Images, "weight"),                 \
        CUDNN_OPS_KERNEL(kDepthwiseConvRolling##Type##Images, "rolling_3_wide"),         \
        CUDNN_OPS_SIZES(kDepthwiseConvInput##Type##Images, "input", ""),                 \
        CUDNN_OPS_WIDTHS(kDepthwiseConvForward##Type##Images, "forward"),                \
        CUDNN_OPS_WIDTHS(kDepthwiseConvWeight##Type##Images, "weight"),                  \
        CUDNN_OPS_WIDTHS(kDepthwiseConvInput##Type##Images, "input"), {                  \
      kDepthwiseConvWeight##Type##Images, "depthwise_conv_add_up", /*starts_early=*/true \
    }                                                                                    \
  }

const TypeKernels& kernels_of(at::ScalarType dtype) {
  static const TypeKernels all[3] = {CUDNN_OPS_KERNELS(Half), CUDNN_OPS_KERNELS(BFloat16),
                                     CUDNN_OPS_KERNELS(Float)};
  return all[type_index(dtype)];
}

// Depth, height and width; images have a depth of 1.
std::array<int64_t, 3> sizes_of(const at::Tensor& image) {
  const bool has_depth = image.dim() == 5;
  return {has_depth ? image.size(2) : 1, image.size(-2), image.size(-1)};
}

// Of a convolution from `input` to `out`.
DepthwiseConvShape shape_of(const at::Tensor& input, const at::Tensor& out,
                            const at::Tensor& weight, const DepthwiseConvSteps& steps) {
  DepthwiseConvShape shape{};
  shape.batch = input.size(0);
  shape.channels = static_cast<int>(input.size(1));
  const auto size = sizes_of(input), out_size = sizes_of(out), taps = sizes_of(weight);
  for (size_t dim = 0; dim < 3; ++dim) {
    shape.size[dim] = static_cast<int>(size[dim]);
    shape.out_size[dim] = static_cast<int>(out_size[dim]);
    shape.taps[dim] = static_cast<int>(taps[dim]);
    shape.stride[dim] = static_cast<int>(steps.stride[dim]);
    shape.dilation[dim] = static_cast<int>(steps.dilation[dim]);
    shape.padding[dim] = static_cast<int>(steps.padding[dim]);
  }
  return shape;
}

bool has_depth(const DepthwiseConvShape& shape) {
  return shape.size[0] != 1 || shape.out_size[0] != 1 || shape.taps[0] != 1;
}

// Which of the kernels of three, five and seven taps fits; negative where none does. The stride is
// 1 or 2 both ways.
int index_of_size(const DepthwiseConvShape& shape) {
  const int size = shape.taps[1], stride = shape.stride[1];
  const bool is_square = shape.taps[2] == size && shape.stride[2] == stride;
  const bool is_dense = shape.dilation[1] == 1 && shape.dilation[2] == 1;
  const bool is_known = (size == 3 || size == 5 || size == 7) && (stride == 1 || stride == 2);
  const bool has_pairs = shape.channels % kPair == 0;
  return is_square && is_dense && is_known && has_pairs && !has_depth(shape) ? size / 2 - 1 : -1;
}

// How a call is spread over blocks.
struct Tiling {
  int64_t pieces, strips, rows, sets;  // threads with the same channels; sets of tiles, one each

  // Of `tiles` tiles of all images.
  Tiling(const DepthwiseConvShape& shape, int64_t width, int64_t threads, int64_t tiles) {
    // Blocks begin with a sector of memory where there are several side by side.
    const int64_t sector = width == kWide ? 4 : 8;
    const int64_t all = shape.channels / width;
    strips = divide_up(all, kMostPieces);
    pieces = divide_up(all, strips);
    if (strips > 1) pieces = divide_up(pieces, sector) * sector;
    rows = threads / pieces;
    sets = divide_up(tiles, rows);
  }
  int threads() const {
    return static_cast<int>(pieces * rows);
  }
  // Each block has `turns` of the sets; how many blocks there are.
  int64_t spread(DepthwiseConvShape& shape, int64_t turns) const {
    shape.pieces = static_cast<int>(pieces);
    shape.strips = static_cast<int>(strips);
    shape.turns = static_cast<int>(turns);
    return strips * divide_up(sets, turns);
  }
};

// In blocks as large as leaves two for each processor.
Tiling tiling_of(const DepthwiseConvShape& shape, int64_t width, int64_t tiles,
                 int64_t most_threads = kThreads) {
  const int64_t wanted = 2 * current_limits().processors;
  for (int64_t threads = most_threads; threads > kLeastThreads; threads /= 2) {
    const Tiling tiling(shape, width, threads, tiles);
    if (tiling.strips * tiling.sets >= wanted) return tiling;
  }
  return {shape, width, kLeastThreads, tiles};
}

// Sets of tiles of a block: what it begins with serves all of them. Fewer where blocks would no
// longer keep all processors busy to the end.
int64_t turns_of(const Tiling& tiling, const DeviceKernel& kernel, int shared_bytes) {
  constexpr int64_t kMost = 8, kWaves = 4;
  const int64_t resident = kernel.resident_blocks(tiling.threads(), shared_bytes);
  return std::clamp<int64_t>(tiling.sets * tiling.strips / (kWaves * resident), 1, kMost);
}

int64_t tiles_of(DepthwiseConvShape& shape, int64_t down, int64_t across) {
  shape.tiles[0] = static_cast<int>(down);
  shape.tiles[1] = static_cast<int>(across);
  return shape.batch * down * across;
}

// Of the taps that a block keeps, all of them as in Taps of depthwise_conv.cuh.
int taps_bytes(const DepthwiseConvShape& shape, int64_t width = kPair) {
  const int64_t taps = int64_t{shape.taps[1]} * shape.taps[2];
  return static_cast<int>(taps * width * (kMostPieces + 1) * kFloatBytes);
}

// Cuts columns of tiles, down which threads go row by row, into stretches that take the least time,
// as far as that can be told from outside. Where there are many threads a multiprocessor computes
// all the time, its blocks' rows one after another; and begins each with work of some rows. Where
// there are few, they wait for each row of the input that they read, for as long as the block takes
// to compute with some: fewer for more taps and channels.
Tiling cut_columns(DepthwiseConvShape& shape, const DeviceKernel& kernel, int64_t width) {
  constexpr int64_t kBeginning = 2, kMostWait = 5, kManyWaves = 4;
  const int64_t rows = std::max(shape.out_size[1], 1), taps = shape.taps[1];
  const int64_t wait = kMostWait - taps / 2 - width / kWide;
  const int64_t processors = current_limits().processors;
  const int64_t across = divide_up(shape.out_size[2], kTileColumns);
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int64_t parts = 1; parts <= rows; parts += 1 + parts / 8) {
    const int64_t stretch = divide_up(rows, parts), down = divide_up(rows, stretch);
    const Tiling tiling(shape, width, kRollingThreads, shape.batch * down * across);
    const int64_t blocks = tiling.strips * tiling.sets;
    const int64_t resident = kernel.resident_blocks(tiling.threads(), taps_bytes(shape, width));
    const int64_t computing = divide_up(blocks, processors) * (stretch + kBeginning);
    const int64_t waiting = divide_up(blocks, resident) * (stretch + taps - 1) * wait;
    const int64_t time = std::max(computing, waiting);
    if (time < least) {
      least = time;
      shape.stretch = static_cast<int>(stretch);
    }
    if (blocks > kManyWaves * resident) break;
  }
  const int64_t tiles = tiles_of(shape, divide_up(rows, shape.stretch), across);
  return tiling_of(shape, width, tiles, kRollingThreads);
}

void launch(const DeviceKernel& kernel, DepthwiseConvCall& call, const Tiling& tiling,
            int shared_bytes) {
  const int64_t turns = turns_of(tiling, kernel, shared_bytes);
  const int64_t blocks = tiling.spread(call.shape, turns);
  void* argument = &call;
  kernel.launch(blocks, 1, tiling.threads(), &argument, shared_bytes);
}

// Whether images can be read and written four channels at a time, by the kernel that does so.
bool can_be_wide(const DepthwiseConvCall& call, at::ScalarType dtype) {
  const auto& shape = call.shape;
  const void* const images[] = {call.input, call.residual, call.before, call.out};
  uintptr_t addresses = 0;
  for (const void* image : images) addresses |= reinterpret_cast<uintptr_t>(image);
  const size_t bytes = c10::elementSize(dtype);
  return bytes == 2 && shape.taps[1] == 3 && shape.channels % kWide == 0 &&
         addresses % (kWide * bytes) == 0;
}

// Of a convolution, or of the gradient of its input as one.
void launch_forward(DepthwiseConvCall& call, at::ScalarType dtype) {
  const auto& kernels = kernels_of(dtype);
  auto& shape = call.shape;
  const int size = index_of_size(shape);
  const int64_t width = shape.channels % kPair == 0 ? kPair : 1;
  if (size < 0) {
    constexpr int64_t kSpread = 2;  // as in stage_taps() of depthwise_conv_forward.cu
    const int64_t tiles = tiles_of(shape, int64_t{shape.out_size[0]} * shape.out_size[1],
                                   divide_up(shape.out_size[2], kRun));
    const Tiling tiling = tiling_of(shape, width, tiles);
    return launch(kernels.forward_any[width - 1], call, tiling,
                  static_cast<int>(std::min(shape.taps[2], kStaged) *
                                   (width * tiling.pieces + kSpread) * kFloatBytes));
  }
  if (launch_whole(call, dtype)) return;
  if (shape.stride[1] == 1) {
    const bool is_wide = can_be_wide(call, dtype);
    const int64_t of_thread = is_wide ? kWide : kPair;
    const auto& kernel = is_wide ? kernels.wide : kernels.rolling[size];
    return launch(kernel, call, cut_columns(shape, kernel, of_thread),
                  taps_bytes(shape, of_thread));
  }
  const int64_t tiles = tiles_of(shape, divide_up(shape.out_size[1], kTileRows),
                                 divide_up(shape.out_size[2], kTileColumns));
  const Tiling tiling = tiling_of(shape, width, tiles);
  launch(kernels.forward[size], call, tiling, taps_bytes(shape));
}

// The gradients by a launch whose blocks leave `call.partials` rows of sums.
void launch_sums(DepthwiseConvWeightCall& call, const DeviceKernel& kernel, int64_t blocks,
                 int64_t groups_of_taps, int threads, int shared_bytes,
                 const at::Tensor& grad_weight, const DeviceKernel& add_up) {
  const int64_t all =
      grad_weight.numel() + (call.grad_bias != nullptr ? int64_t{call.shape.channels} : 0);
  at::Tensor partial;
  if (call.partials > 1) {
    partial = at::detail::empty_cuda({int64_t{call.partials} * all}, at::kFloat,
                                     grad_weight.device(), std::nullopt);
    call.partial = static_cast<float*>(partial.mutable_data_ptr());
  }
  void* argument = &call;
  kernel.launch(blocks, static_cast<int>(groups_of_taps), threads, &argument, shared_bytes);
  if (call.partials > 1) add_up.launch(divide_up(all, kStrip), 1, 1024, &argument);
}

// The sets of tiles are spread over as many blocks as run at the same time, each of which leaves
// one row of sums.
void launch_weight(DepthwiseConvWeightCall& call, const DeviceKernel& kernel, const Tiling& tiling,
                   int64_t groups_of_taps, int taps_at_once, int64_t width,
                   const at::Tensor& grad_weight, const DeviceKernel& add_up) {
  const int shared_bytes = tiling.threads() * taps_at_once * static_cast<int>(width) * kFloatBytes;
  const int64_t resident = kernel.resident_blocks(tiling.threads(), shared_bytes);
  const int64_t wanted =
      std::clamp<int64_t>(resident / (tiling.strips * groups_of_taps), 1, tiling.sets);
  const int64_t blocks = tiling.spread(call.shape, divide_up(tiling.sets, wanted));
  call.partials = static_cast<unsigned>(blocks / tiling.strips);
  launch_sums(call, kernel, blocks, groups_of_taps, tiling.threads(), shared_bytes, grad_weight,
              add_up);
}

}  // namespace

void depthwise_conv(const at::Tensor& input, const at::Tensor& weight,
                    const DepthwiseConvSteps& steps, const std::optional<at::Tensor>& bias,
                    const std::optional<at::Tensor>& residual, Activation activation,
                    const at::Tensor& before, const at::Tensor& out) {
  DepthwiseConvCall call{};
  call.shape = shape_of(input, out, weight, steps);
  call.input = input.const_data_ptr();
  call.weight = weight.const_data_ptr();
  call.bias = bias ? bias->const_data_ptr() : nullptr;
  call.residual = residual ? residual->const_data_ptr() : nullptr;
  call.before = before.defined() ? before.mutable_data_ptr() : nullptr;
  call.out = out.mutable_data_ptr();
  call.activation = static_cast<int>(activation);
  launch_forward(call, input.scalar_type());
}

void depthwise_conv_input(const at::Tensor& grad_out, const at::Tensor& weight,
                          const DepthwiseConvSteps& steps, const at::Tensor& grad_input) {
  DepthwiseConvCall call{};
  call.input = grad_out.const_data_ptr();
  call.weight = weight.const_data_ptr();
  call.out = grad_input.mutable_data_ptr();
  const auto taps = sizes_of(weight);
  if (steps.stride == std::array<int64_t, 3>{1, 1, 1}) {
    // The outputs' gradients take the inputs' place, with the taps turned around.
    DepthwiseConvSteps turned = steps;
    for (size_t dim = 0; dim < taps.size(); ++dim) {
      turned.padding[dim] = (taps[dim] - 1) * steps.dilation[dim] - steps.padding[dim];
    }
    call.shape = shape_of(grad_out, grad_input, weight, turned);
    call.is_turned = true;
    return launch_forward(call, grad_out.scalar_type());
  }
  const auto& kernels = kernels_of(grad_out.scalar_type());
  call.shape = shape_of(grad_input, grad_out, weight, steps);
  auto& shape = call.shape;
  const int size = shape.stride[1] == 2 ? index_of_size(shape) : -1;
  const int64_t width = shape.channels % kPair == 0 ? kPair : 1;
  if (size < 0) {
    const int64_t tiles =
        tiles_of(shape, int64_t{shape.size[0]} * shape.size[1], int64_t{shape.size[2]});
    return launch(kernels.input_any[width - 1], call, tiling_of(shape, width, tiles), 0);
  }
  // Tiles begin at even numbers of zeros and pixels: with an odd number of zeros, one before.
  const int64_t tiles =
      tiles_of(shape, divide_up(shape.size[1] + shape.padding[1] % 2, kStridedRows),
               divide_up(shape.size[2] + shape.padding[2] % 2, kStridedColumns));
  const Tiling tiling = tiling_of(shape, width, tiles);
  launch(kernels.input[size], call, tiling, taps_bytes(shape));
}

void depthwise_conv_weight(const at::Tensor& input, const at::Tensor& grad_out,
                           const DepthwiseConvSteps& steps, const at::Tensor& grad_weight,
                           const at::Tensor& grad_bias) {
  const auto& kernels = kernels_of(input.scalar_type());
  DepthwiseConvWeightCall call{};
  call.shape = shape_of(input, grad_out, grad_weight, steps);
  call.input = input.const_data_ptr();
  call.grad_out = grad_out.const_data_ptr();
  call.grad_weight = grad_weight.mutable_data_ptr();
  call.grad_bias = grad_bias.defined() ? grad_bias.mutable_data_ptr() : nullptr;
  auto& shape = call.shape;
  const int size = index_of_size(shape);
  const int64_t width = shape.channels % kPair == 0 ? kPair : 1;
  if (size < 0) {
    const int64_t lines = int64_t{shape.out_size[0]} * shape.out_size[1];
    const int64_t tiles = tiles_of(shape, lines, divide_up(shape.out_size[2], kStretch));
    const int64_t groups = int64_t{shape.taps[0]} * shape.taps[1] * divide_up(shape.taps[2], kTaps);
    return launch_weight(call, kernels.weight_any[width - 1], {shape, width, kThreads, tiles},
                         groups, kTaps, width, grad_weight, kernels.add_up);
  }
  if (const auto whole = spread_whole_weight(call, input.scalar_type())) {
    return launch_sums(call, *whole->kernel, whole->blocks, /*groups_of_taps=*/1, whole->threads,
                       whole->shared_bytes, grad_weight, kernels.add_up);
  }
  const int64_t tiles = tiles_of(shape, divide_up(shape.out_size[1], kTileRows),
                                 divide_up(shape.out_size[2], kTileColumns));
  launch_weight(call, kernels.weight[shape.stride[1] - 1][size],
                {shape, width, kWeightThreads, tiles}, /*groups_of_taps=*/1, shape.taps[2], width,
                grad_weight, kernels.add_up);
}

}  // namespace cudnn_ops
