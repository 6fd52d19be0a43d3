// Depthwise convolutions of images as in depthwise_conv_rolling.cu, by blocks that have their input
// in shared memory: all that they read is under way at once, and threads share it. Of small images
// they have whole ones. Compiled when the package is built (cmake/compile_kernels.py);
// depthwise_conv_whole_cuda.cpp launches it.

#include "depthwise_conv_outputs.cuh"
#include "depthwise_conv_whole.cuh"
#include "threads.cuh"

namespace {

// The taps of an image's convolution, in float32, and behind them its pixels, which are copied in
// whole vectors.
template <int kSize>
using AllTaps = Taps<kSize * kSize>;
template <int kSize>
__device__ float* behind_taps() {
  constexpr int kFloats = kSize * kSize * AllTaps<kSize>::kStep, kVector = 4;
  extern __shared__ float shared[];
  return shared + (kFloats + kVector - 1) / kVector * kVector;
}

// What one row of the input, the r-th that there are taps for, adds to some rows of outputs. Its
// pixels are those that the outputs of a row meet, or without the zeros on either side.
template <int kSize, int kStride, int kPixels, int kRows, int kColumns>
__device__ void add_row(float (&sums)[kRows][kColumns][kPair], const AllTaps<kSize>& taps,
                        const float (&values)[kPixels][kPair], int r, int rows) {
  constexpr int kBefore = kPixels == kStride * kColumns ? kSize / 2 : 0;
#pragma unroll
  for (int y = 0; y < kRows; ++y) {
    const int tap = r - y * kStride;
    if (y >= rows || (unsigned)tap >= (unsigned)kSize) continue;
#pragma unroll
    for (int t = 0; t < kSize; ++t) {
      const auto weight = taps[tap * kSize + t];
#pragma unroll
      for (int x = 0; x < kColumns; ++x) {
        const int column = x * kStride + t - kBefore;
        if (column < 0 || column >= kPixels) continue;
        add_product(sums[y][x], weight.channels, values[column]);
      }
    }
  }
}

// Whole images, with kColumns outputs to a row; the input's rows have kStride times as many pixels.
// A row is a thread's: which taps meet which pixels is known, and none meets the zeros beside them.
template <int kSize, int kStride, int kColumns>
__device__ void forward(const DepthwiseConvCall& call) {
  wait_for_inputs();
  constexpr int kPixels = kStride * kColumns, kRows = kPixels > kMostWhole ? 1 : kWholeRows;
  const auto& shape = call.shape;
  const Place place(shape, kPair, blockIdx.x);
  const int height = shape.size[1], out_height = shape.out_size[1];
  const long long first = place.set * shape.turns;
  const int count = (int)min((long long)shape.turns, shape.batch - first);
  const WholeImages<kPixels> images(shape, place, shape.spread, behind_taps<kSize>());
  images.load(call.input, first * height, count * height);
  const AllTaps<kSize> taps(call, place);
  wait_for_copies();
  let_next_start();
  __syncthreads();
  if (place.piece >= place.pieces) return;
  const int units = (out_height + shape.stretch - 1) / shape.stretch;
  for (int unit = place.row; unit < count * units; unit += place.rows) {
    const int image = unit / units, start = (unit - image * units) * shape.stretch;
    const int rows = min(shape.stretch, out_height - start);
    const int top = start * kStride - shape.padding[1];
    const int end = min((rows - 1) * kStride + kSize, height - top);
    Outputs<kRows, kColumns, kPair> outputs;
#pragma unroll 1
    for (int r = max(0, -top); r < end; ++r) {
      float values[kPixels][kPair];
      images.read(image * height + top + r, values);
      add_row<kSize, kStride>(outputs.sums, taps, values, r, rows);
    }
    const long long row = (first + image) * out_height + start;
    outputs.finish(call, place, row * kColumns * place.pieces + place.piece,
                   (long long)kColumns * place.pieces, rows, kColumns);
  }
}

// Parts of images, with strides of 1: a block has `turns` rows of kColumns outputs.
template <int kSize, int kColumns>
__device__ void forward_parts(const DepthwiseConvCall& call) {
  wait_for_inputs();
  constexpr int kPixels = kColumns + kSize - 1;
  const auto& shape = call.shape;
  const Place place(shape, kPair, blockIdx.x);
  const int out_height = shape.out_size[1], out_width = shape.out_size[2];
  const int parts = shape.tiles[0] * shape.tiles[1];
  const long long image = place.set / parts;
  const int part = (int)(place.set - image * parts), down = part / shape.tiles[1];
  const int begin = down * shape.turns, column = (part - down * shape.tiles[1]) * kColumns;
  const int count = min(shape.turns, out_height - begin), top = begin - shape.padding[1];
  const WholeImages<kPixels> pixels(shape, place, shape.spread, behind_taps<kSize>());
  pixels.load_part(call.input, image, shape.size, top, column - shape.padding[2],
                   count + kSize - 1);
  const AllTaps<kSize> taps(call, place);
  wait_for_copies();
  let_next_start();
  __syncthreads();
  if (place.piece >= place.pieces) return;
  const int step = place.rows * shape.stretch;
  for (int start = place.row * shape.stretch; start < count; start += step) {
    const int rows = min(shape.stretch, count - start);
    const int end = min(rows + kSize - 1, shape.size[1] - top - start);
    Outputs<kWholeRows, kColumns, kPair> outputs;
#pragma unroll 1
    for (int r = max(0, -top - start); r < end; ++r) {
      float values[kPixels][kPair];
      pixels.read(start + r, values);
      add_row<kSize, 1>(outputs.sums, taps, values, r, rows);
    }
    const long long row = image * out_height + begin + start;
    outputs.finish(call, place, (row * out_width + column) * place.pieces + place.piece,
                   (long long)out_width * place.pieces, rows, out_width - column);
  }
}

}  // namespace

#define WHOLE(size, stride, columns)                                     \
  DEPTHWISE_CONV(whole_##size##_##stride##_##columns, DepthwiseConvCall, \
                 (forward<size, stride, columns>), (kWholeThreads, kWholeBlocks))
WHOLE_SIZES(WHOLE)

#define PARTS(size)                                                                    \
  DEPTHWISE_CONV(parts_##size, DepthwiseConvCall, (forward_parts<size, kPartColumns>), \
                 (kWholeThreads, kWholeBlocks))
PARTS(5)
PARTS(7)
