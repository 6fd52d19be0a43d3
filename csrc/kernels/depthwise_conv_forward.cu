// Depthwise convolutions of images and volumes, the channels last in memory: the forward with its
// epilogue, activation(conv + bias + residual), which with the taps turned around is the gradient
// of the input too, where the strides are 1. A thread has two channels, and of those a tile of
// outputs: each input that it reads serves all of them. Where sizes are known and the strides are
// 1, depthwise_conv_rolling.cu has its kernels. Compiled when the package is built
// (cmake/compile_kernels.py); depthwise_conv_cuda.cpp launches it.

#include "depthwise_conv_outputs.cuh"

namespace {

// Of an image, with as many taps each way as the template says, and strides of 2.
template <int kSize>
__device__ void forward(const DepthwiseConvCall& call) {
  constexpr int kStride = 2;
  constexpr int kRows = (kTileRows - 1) * kStride + kSize;
  constexpr int kColumns = (kTileColumns - 1) * kStride + kSize;
  const auto& shape = call.shape;
  const Place place(shape, kPair, blockIdx.x);
  const Taps<kSize * kSize> taps(call, place);
  if (place.piece >= place.pieces) return;
  const int height = shape.size[1], width = shape.size[2];
  for_tiles(shape, place, [&](long long image, int down, int across) {
    const int row = down * kTileRows, column = across * kTileColumns;
    const int first = row * kStride - shape.padding[1];
    const int left = column * kStride - shape.padding[2];
    const Strip<kColumns> input(call.input, image, height, width, left, place);
    Outputs<kTileRows, kTileColumns, kPair> outputs;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool is_there = (unsigned)(first + r) < (unsigned)height;
      if (kSkipsRows<kSize> && !is_there) continue;
      float values[kColumns][kPair];
      input.read(first + r, values, is_there);
#pragma unroll
      for (int y = 0; y < kTileRows; ++y) {
        const int tap = r - y * kStride;
        if (tap < 0 || tap >= kSize) continue;
#pragma unroll
        for (int t = 0; t < kSize; ++t) {
          const auto weight = taps[tap * kSize + t];
#pragma unroll
          for (int x = 0; x < kTileColumns; ++x) {
            add_product(outputs.sums[y][x], weight.channels, values[x * kStride + t]);
          }
        }
      }
    }
    const long long index =
        ((image * shape.out_size[1] + row) * shape.out_size[2] + column) * place.pieces +
        place.piece;
    outputs.finish(call, place, index, (long long)shape.out_size[2] * place.pieces,
                   shape.out_size[1] - row, shape.out_size[2] - column);
  });
}

// Some taps of a row, for all channels of a block; all threads come here.
template <int kWidth>
__device__ void stage_taps(const DepthwiseConvCall& call, const Place& place, float* staged,
                           int begin, int count) {
  const auto& shape = call.shape;
  const int all = shape.taps[0] * shape.taps[1] * shape.taps[2];
  const int step = shape.pieces * kWidth + 2, first = (place.piece - place.own) * kWidth;
  const int channels = min(shape.pieces * kWidth, shape.channels - first);
  const auto* weight = (const Bits*)call.weight + (long long)first * all;
  __syncthreads();
  for (int i = threadIdx.x; i < channels * count; i += blockDim.x) {
    const int channel = i / count, tap = i - channel * count;
    const int at = call.is_turned ? all - 1 - begin - tap : begin + tap;
    staged[tap * step + channel] = Type::read(weight[(long long)channel * all + at]);
  }
  __syncthreads();
}

// What they add to a run of outputs, whose input of the first tap is `first`.
template <int kWidth>
__device__ void add_taps(const DepthwiseConvShape& shape, const Row<kWidth>& input,
                         const float* taps, int first, int count, float (&sums)[kRun][kWidth]) {
  const int step = shape.pieces * kWidth + 2;
  if (shape.stride[2] == 1 && shape.dilation[2] == 1) {
    // The inputs of all outputs of the run at one tap; for the next tap they move on by one.
    float window[kRun][kWidth];
#pragma unroll
    for (int i = 1; i < kRun; ++i) input.read(first + i - 1, window[i]);
#pragma unroll 8
    for (int tap = 0; tap < count; ++tap) {
#pragma unroll
      for (int i = 0; i < kRun - 1; ++i) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) window[i][k] = window[i + 1][k];
      }
      input.read(first + tap + kRun - 1, window[kRun - 1]);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float weight = taps[tap * step + k];
#pragma unroll
        for (int i = 0; i < kRun; ++i) sums[i][k] = fmaf(weight, window[i][k], sums[i][k]);
      }
    }
    return;
  }
  for (int tap = 0; tap < count; ++tap) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      float values[kWidth];
      input.read(first + i * shape.stride[2] + tap * shape.dilation[2], values);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        sums[i][k] = fmaf(taps[tap * step + k], values[k], sums[i][k]);
      }
    }
  }
}

// Of any geometry: tiles are runs of outputs across, counted over depth and height. The block's
// threads go through the taps together.
template <int kWidth>
__device__ void forward_any(const DepthwiseConvCall& call) {
  extern __shared__ float shared[];  // [kStaged][channels + 2]
  const auto& shape = call.shape;
  const Place place(shape, kWidth, blockIdx.x);
  const int lines = shape.tiles[0], runs = shape.tiles[1];
  const long long all = shape.batch * lines * runs;
  for (int turn = 0; turn < shape.turns; ++turn) {
    const long long tile = (place.set * shape.turns + turn) * place.rows + place.row;
    if (tile - place.row >= all) return;  // all threads do
    const bool is_there = tile < all && place.piece < place.pieces;
    const long long at = tile / runs, image = at / lines;
    const int start = (int)(tile - at * runs) * kRun, line = (int)(at - image * lines);
    const int depth = line / shape.out_size[1], height = line - depth * shape.out_size[1];
    Outputs<1, kRun, kWidth> outputs;
    for (int row = 0; row < shape.taps[0] * shape.taps[1]; ++row) {
      const int d = row / shape.taps[1], h = row - d * shape.taps[1];
      const int z = depth * shape.stride[0] - shape.padding[0] + d * shape.dilation[0];
      const int y = height * shape.stride[1] - shape.padding[1] + h * shape.dilation[1];
      const bool is_in = is_there && (unsigned)z < (unsigned)shape.size[0] &&
                         (unsigned)y < (unsigned)shape.size[1];
      const Row<kWidth> input(call.input, (image * shape.size[0] + z) * shape.size[1] + y,
                              shape.size[2], place);
      for (int tap = 0; tap < shape.taps[2]; tap += kStaged) {
        const int count = min(kStaged, shape.taps[2] - tap);
        stage_taps<kWidth>(call, place, shared, row * shape.taps[2] + tap, count);
        const int first = start * shape.stride[2] - shape.padding[2] + tap * shape.dilation[2];
        if (is_in) {
          add_taps(shape, input, shared + place.own * kWidth, first, count, outputs.sums[0]);
        }
      }
    }
    if (!is_there) continue;
    const long long index = (at * shape.out_size[2] + start) * place.pieces + place.piece;
    outputs.finish(call, place, index, 0, 1, shape.out_size[2] - start);
  }
}

}  // namespace

DEPTHWISE_CONV(forward_3_2, DepthwiseConvCall, forward<3>, (256, 2))
DEPTHWISE_CONV(forward_5_2, DepthwiseConvCall, forward<5>, (256, 2))
DEPTHWISE_CONV(forward_7_2, DepthwiseConvCall, forward<7>, (256, 2))
DEPTHWISE_CONV(forward_pairs, DepthwiseConvCall, (forward_any<kPair>), (256, 3))
DEPTHWISE_CONV(forward_singles, DepthwiseConvCall, (forward_any<1>), (256, 3))
