#include "kernels/depthwise_conv_whole.h"

#include "depthwise_conv_whole_bfloat16_images.h"
#include "depthwise_conv_whole_float_images.h"
#include "depthwise_conv_whole_half_images.h"
#include "depthwise_conv_whole_weight_bfloat16_images.h"
#include "depthwise_conv_whole_weight_float_images.h"
#include "depthwise_conv_whole_weight_half_images.h"
#include "kernels/depthwise_conv.h"

#include <algorithm>

namespace cudnn_ops {
namespace {

using namespace depthwise_images;

// Numbers of blocks' channels, which are copied as many at a time.
constexpr int64_t kVector = 8, kVectorBytes = 16;

struct TypeKernels {
  // By outputs to a row, 7 and 14, strides of 1 and 2, and three, five and seven taps each way.
  DeviceKernel forward[2][2][3], weight[2][2][3];
  // Of parts of images: of five and seven taps.
  DeviceKernel parts[2], weight_parts[2];
};

#define CUDNN_OPS_KERNEL(images, name) {images, "depthwise_conv_" name, /*starts_early=*/true}
#define CUDNN_OPS_SIZES(images, name, ending)                                              \
  {CUDNN_OPS_KERNEL(images, name "_3" ending), CUDNN_OPS_KERNEL(images, name "_5" ending), \
   CUDNN_OPS_KERNEL(images, name "_7" ending)}
#define CUDNN_OPS_STRIDES(images, name, ending) \
  {CUDNN_OPS_SIZES(images, name, "_1" ending), CUDNN_OPS_SIZES(images, name, "_2" ending)}
#define CUDNN_OPS_COLUMNS(images, name) \
  {CUDNN_OPS_STRIDES(images, name, "_7"), CUDNN_OPS_STRIDES(images, name, "_14")}
#define CUDNN_OPS_PARTS(images, name) \
  {CUDNN_OPS_KERNEL(images, name "_5"), CUDNN_OPS_KERNEL(images, name "_7")}
#define CUDNN_OPS_KERNELS(Type)                                                \
  {CUDNN_OPS_COLUMNS(kDepthwiseConvWhole##Type##Images, "whole"),              \
   CUDNN_OPS_COLUMNS(kDepthwiseConvWholeWeight##Type##Images, "whole_weight"), \
   CUDNN_OPS_PARTS(kDepthwiseConvWhole##Type##Images, "parts"),                \
   CUDNN_OPS_PARTS(kDepthwiseConvWholeWeight##Type##Images, "weight_parts")}

const TypeKernels& kernels_of(at::ScalarType dtype) {
  static const TypeKernels all[3] = {CUDNN_OPS_KERNELS(Half), CUDNN_OPS_KERNELS(BFloat16),
                                     CUDNN_OPS_KERNELS(Float)};
  return all[type_index(dtype)];
}

// The one of them that fits; null where none does.
const DeviceKernel* kernel_of(const DepthwiseConvShape& shape,
                              const DeviceKernel (&kernels)[2][2][3]) {
  const int stride = shape.stride[1], taps = shape.taps[1];
  if (!has_whole_kernels(shape.channels, shape.size[2], shape.out_size[2], taps, stride,
                         shape.padding[2])) {
    return nullptr;
  }
  return &kernels[shape.out_size[2] == 7 ? 0 : 1][stride - 1][taps / 2 - 1];
}

int64_t numbers_of(const DepthwiseConvShape& shape) {
  return int64_t{shape.batch} * shape.channels * shape.size[1] * shape.size[2];
}

// Whether kernels of whole images were measured to be faster than those that go down rows (H200,
// bfloat16): with more numbers these took 0.83 to 0.98 of the time, with a stride of 2 and up to
// five taps from few on.
bool is_faster_whole(const DepthwiseConvShape& shape) {
  constexpr int64_t kMost = 13 << 19, kMostOfStrides = 1 << 20;
  const bool is_strided = shape.stride[1] > 1;
  if (is_strided && shape.taps[1] == 7) return true;
  return numbers_of(shape) <= (is_strided ? kMostOfStrides : kMost);
}

// And those of parts, which read what is around them again: with more numbers the others took 0.71
// to 0.86 of the time.
bool is_faster_by_parts(const DepthwiseConvShape& shape) {
  return numbers_of(shape) <= 1 << 20;
}

bool is_vector(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0;
}

// The channels of blocks that have at most so many pieces of them.
struct Pieces {
  int64_t strips, pieces;

  Pieces(const DepthwiseConvShape& shape, int64_t most) {
    const int64_t all = shape.channels / kPair;
    strips = divide_up(all, most);
    pieces = divide_up(all, strips);
    if (strips > 1) pieces = divide_up(pieces, kVector) * kVector;
  }
  // Those behind each row of an image in shared memory, for threads of a warp whose rows are so
  // many apart to read from unlike banks, if that can be.
  int64_t spread(int64_t pixels, int64_t rows) const {
    constexpr int64_t kBanks = 32, kStep = kVector / kPair;
    if (pieces % kBanks == 0) return 0;
    for (int64_t spread = 0; spread < kBanks; spread += kStep) {
      if ((rows * (pixels * pieces + spread) - pieces) % kBanks == 0) return spread;
    }
    return kStep;
  }
};

// What the time of a block is made of, as far as that can be told from outside: of cycles in which
// one of a multiprocessor's parts begins an instruction, and of waiting for memory.
constexpr int64_t kLane = 32, kParts = 4, kWait = 1500, kBeginning = 150;
// Instructions to find, convert and keep one number of the taps, to copy a vector, and to write an
// output.
constexpr int64_t kOfTap = 10, kOfCopy = 6, kOfOutput = 5;
// Threads and shared memory of a multiprocessor.
constexpr int64_t kAllThreads = int64_t{kWholeBlocks} * kWholeThreads, kAllShared = 200 << 10;

// Of blocks whose threads take so many instructions each. Threads that have a multiprocessor for
// themselves wait for their own results too.
int64_t time_of(const DeviceLimits& limits, int64_t blocks, int64_t threads, int64_t shared_bytes,
                int64_t instructions) {
  const int64_t each = divide_up(blocks, limits.processors);
  const int64_t resident =
      std::clamp<int64_t>(std::min(kAllThreads / threads, kAllShared / shared_bytes), 1, each);
  const int64_t computing = each * divide_up(threads, kLane) * instructions / kParts;
  return std::max(computing, divide_up(each, resident) * (instructions * 3 / 2 + kWait));
}

// What the blocks of a forward have: whole images, or parts that are as good as images. Rows of
// outputs, and of the input for them, and how many outputs and pixels a row has.
struct Images {
  int64_t count, out_rows, rows, outputs, pixels;
};

// How they are spread: so many of them to a block, whose threads have `stretch` rows of outputs at
// a time.
struct Spread {
  int64_t strips, pieces, count, stretch, spread, threads, blocks, shared_bytes, time;

  Spread(const DeviceLimits& limits, const DepthwiseConvShape& shape, const Images& images,
         int64_t piece_bytes, int64_t most_pieces, int64_t count, int64_t stretch)
      : count(count), stretch(stretch) {
    const Pieces channels(shape, most_pieces);
    strips = channels.strips, pieces = channels.pieces;
    const int64_t stride = shape.stride[1], taps = shape.taps[1];
    spread = channels.spread(images.pixels, stretch * stride);
    const int64_t units = count * divide_up(images.out_rows, stretch);
    threads = pieces * std::clamp<int64_t>(kWholeThreads / pieces, 1, units);
    blocks = strips * divide_up(images.count, count);
    const int64_t tap_bytes =
        taps * taps * kPair * (kMostPieces + 1) * static_cast<int64_t>(sizeof(float));
    shared_bytes = divide_up(tap_bytes, kVectorBytes) * kVectorBytes +
                   count * images.rows * (images.pixels * pieces + spread) * piece_bytes;
    const int64_t of_unit = stretch * taps * taps * (kPair * images.outputs + 1) +
                            ((stretch - 1) * stride + taps) * (kPair + 1) * images.pixels +
                            stretch * images.outputs * kOfOutput;
    const int64_t copies = count * images.rows * images.pixels * pieces * kPair / kVector;
    const int64_t of_thread = divide_up(units * pieces, threads) * of_unit +
                              divide_up(taps * taps * kPair * pieces, threads) * kOfTap +
                              divide_up(copies, threads) * kOfCopy + kBeginning;
    time = time_of(limits, blocks, threads, shared_bytes, of_thread);
  }
  // Wider blocks read longer runs of memory.
  bool is_better_than(const std::optional<Spread>& other) const {
    constexpr int64_t kGain = 8;
    if (!other) return true;
    return time + (pieces < other->pieces ? time / kGain : 0) < other->time;
  }
};

// How those of a gradient of the weight are, one after another to a block.
struct WeightSpread {
  int64_t strips, pieces, spread, threads, image_bytes, sum_bytes, time;

  WeightSpread(const DeviceLimits& limits, const DepthwiseConvShape& shape, const Images& images,
               int64_t piece_bytes, int64_t most_pieces) {
    const Pieces channels(shape, most_pieces);
    strips = channels.strips, pieces = channels.pieces;
    const int64_t taps = shape.taps[1];
    spread = channels.spread(images.pixels, /*rows=*/1);
    const int64_t shares = std::clamp<int64_t>(kWholeThreads / (pieces * taps), 1, images.out_rows);
    threads = pieces * taps * shares;
    const int64_t pixels = images.rows * images.pixels, outputs = images.out_rows * images.outputs;
    image_bytes = ((pixels + outputs) * pieces + images.rows * spread) * piece_bytes;
    sum_bytes = (taps + 1) * kPair * threads * static_cast<int64_t>(sizeof(float));
    const int64_t copies = (pixels + outputs) * pieces * kPair / kVector;
    const int64_t of_row =
        taps * kPair * images.outputs + (images.pixels + images.outputs) * (kPair + 1);
    const int64_t of_image = divide_up(images.out_rows, shares) * of_row +
                             divide_up(copies, threads) * kOfCopy + kBeginning;
    const int64_t of_sums = divide_up(taps * taps * kPair * pieces, threads) * kOfTap + kBeginning;
    const int64_t each = images_of_block(images.count, kAllThreads / threads * limits.processors);
    time = time_of(limits, strips * divide_up(images.count, each), threads, shared_bytes(each),
                   each * of_image + of_sums);
  }
  // Where so many blocks run at a time.
  int64_t images_of_block(int64_t count, int64_t resident) const {
    return divide_up(count, std::max<int64_t>(resident / strips, 1));
  }
  // The threads' sums come where images were.
  int64_t shared_bytes(int64_t images) const {
    return std::max(std::min<int64_t>(images, 2) * image_bytes, sum_bytes);
  }
};

void spread_channels(DepthwiseConvShape& shape, int64_t pieces, int64_t strips, int64_t spread) {
  shape.pieces = static_cast<int>(pieces);
  shape.strips = static_cast<int>(strips);
  shape.spread = static_cast<int>(spread);
}

int64_t piece_bytes_of(at::ScalarType dtype) {
  return kPair * static_cast<int64_t>(c10::elementSize(dtype));
}

// So that a multiprocessor has two blocks.
int64_t most_bytes(const DeviceLimits& limits) {
  return std::min(limits.shared_bytes, kAllShared) / 2;
}

// Whether narrower blocks have nothing to offer: there are enough for all multiprocessors.
bool is_enough(const std::optional<Spread>& spread, const DeviceLimits& limits) {
  return spread && spread->blocks >= 2 * limits.processors;
}

void launch_forward(const DeviceKernel& kernel, DepthwiseConvCall& call, const Spread& spread) {
  spread_channels(call.shape, spread.pieces, spread.strips, spread.spread);
  call.shape.stretch = static_cast<int>(spread.stretch);
  void* argument = &call;
  kernel.launch(spread.blocks, 1, static_cast<int>(spread.threads), &argument,
                static_cast<int>(spread.shared_bytes));
}

bool has_parts(const DepthwiseConvShape& shape) {
  return has_part_kernels(shape.channels, shape.out_size[2], shape.taps[1], shape.stride[1]);
}

Images whole_images(const DepthwiseConvShape& shape) {
  return {shape.batch, shape.out_size[1], shape.size[1], shape.out_size[2], shape.size[2]};
}

// Parts of `rows` rows of outputs.
Images parts_of(const DepthwiseConvShape& shape, int64_t rows) {
  const int64_t down = divide_up(shape.out_size[1], rows), reach = shape.taps[1] - 1;
  const int64_t across = divide_up(shape.out_size[2], kPartColumns);
  return {shape.batch * down * across, rows, rows + reach, kPartColumns, kPartColumns + reach};
}

void count_parts(DepthwiseConvShape& shape, int64_t rows) {
  shape.tiles[0] = static_cast<int>(divide_up(shape.out_size[1], rows));
  shape.tiles[1] = static_cast<int>(divide_up(shape.out_size[2], kPartColumns));
}

bool launch_whole_images(const DeviceKernel& kernel, DepthwiseConvCall& call, int64_t piece_bytes) {
  constexpr int64_t kMost = 4;
  auto& shape = call.shape;
  const int64_t most_stretch = shape.size[2] > kMostWhole ? 1 : kWholeRows;
  const Images images = whole_images(shape);
  const DeviceLimits limits = current_limits();
  std::optional<Spread> best;
  for (int64_t pieces = kMostPieces; pieces >= kVector && !is_enough(best, limits); pieces /= 2) {
    for (int64_t count = 1; count <= kMost; count *= 2) {
      for (int64_t stretch = 1; stretch <= most_stretch; ++stretch) {
        const Spread spread(limits, shape, images, piece_bytes, pieces, count, stretch);
        if (spread.shared_bytes <= most_bytes(limits) && spread.is_better_than(best)) best = spread;
      }
    }
  }
  if (!best) return false;
  shape.turns = static_cast<int>(best->count);
  launch_forward(kernel, call, *best);
  return true;
}

bool launch_parts(DepthwiseConvCall& call, at::ScalarType dtype) {
  constexpr int64_t kRows[] = {28, 14, 8, 4, 2};
  auto& shape = call.shape;
  const DeviceLimits limits = current_limits();
  std::optional<Spread> best;
  for (int64_t pieces = kMostPieces; pieces >= kVector && !is_enough(best, limits); pieces /= 2) {
    for (const int64_t most : kRows) {
      const Images parts = parts_of(shape, std::min<int64_t>(most, shape.out_size[1]));
      for (int64_t stretch = 1; stretch <= kWholeRows; ++stretch) {
        const Spread spread(limits, shape, parts, piece_bytes_of(dtype), pieces, /*count=*/1,
                            stretch);
        if (spread.shared_bytes > most_bytes(limits) || !spread.is_better_than(best)) continue;
        best = spread;
        shape.turns = static_cast<int>(parts.out_rows);
      }
    }
  }
  if (!best) return false;
  count_parts(shape, shape.turns);
  launch_forward(kernels_of(dtype).parts[shape.taps[1] / 2 - 2], call, *best);
  return true;
}

}  // namespace

bool launch_whole(DepthwiseConvCall& call, at::ScalarType dtype) {
  if (!is_vector(call.input)) return false;
  const DeviceKernel* kernel = kernel_of(call.shape, kernels_of(dtype).forward);
  if (kernel != nullptr && is_faster_whole(call.shape) &&
      launch_whole_images(*kernel, call, piece_bytes_of(dtype))) {
    return true;
  }
  return has_parts(call.shape) && is_faster_by_parts(call.shape) && launch_parts(call, dtype);
}

std::optional<WholeLaunch> spread_whole_weight(DepthwiseConvWeightCall& call,
                                               at::ScalarType dtype) {
  constexpr int64_t kGain = 8, kBuffers = 2, kRows[] = {14, 7};
  auto& shape = call.shape;
  const DeviceLimits limits = current_limits();
  if (!is_vector(call.input) || !is_vector(call.grad_out)) return {};
  const auto& kernels = kernels_of(dtype);
  const DeviceKernel* kernel = kernel_of(shape, kernels.weight);
  std::optional<WeightSpread> best;
  Images images{};
  const auto choose = [&](const Images& candidate) {
    for (int64_t pieces = kMostPieces; pieces >= kVector; pieces /= 2) {
      const WeightSpread spread(limits, shape, candidate, piece_bytes_of(dtype), pieces);
      if (spread.shared_bytes(kBuffers) > most_bytes(limits)) continue;
      if (best && spread.time + spread.time / kGain >= best->time) continue;
      best = spread;
      images = candidate;
    }
  };
  if (kernel != nullptr) choose(whole_images(shape));
  if (!best && has_parts(shape)) {
    kernel = &kernels.weight_parts[shape.taps[1] / 2 - 2];
    for (const int64_t rows : kRows) {
      choose(parts_of(shape, std::min<int64_t>(rows, shape.out_size[1])));
    }
  }
  if (!best) return {};
  // Of whole images these are not read.
  count_parts(shape, images.out_rows);
  shape.stretch = static_cast<int>(images.out_rows);
  const auto threads = static_cast<int>(best->threads);
  const auto most = static_cast<int>(best->shared_bytes(kBuffers));
  const int64_t each = best->images_of_block(images.count, kernel->resident_blocks(threads, most));
  spread_channels(shape, best->pieces, best->strips, best->spread);
  shape.turns = static_cast<int>(each);
  call.partials = static_cast<unsigned>(divide_up(images.count, each));
  return WholeLaunch{kernel, best->strips * int64_t{call.partials}, threads,
                     static_cast<int>(best->shared_bytes(each))};
}

}  // namespace cudnn_ops
