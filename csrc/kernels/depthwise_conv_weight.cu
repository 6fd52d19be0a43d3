// The gradients of a depthwise convolution's weight and bias: each thread adds up the products of
// some taps over its part of the images, a block those of its threads, and a second kernel those of
// blocks, all in a fixed order. Compiled when the package is built (cmake/compile_kernels.py);
// depthwise_conv_cuda.cpp launches it.

#include "column_sums.cuh"
#include "depthwise_conv_gradients.cuh"
#include "threads.cuh"

namespace {

// Adds up what the block's threads with the same channels have of `count` taps, from `tap` on: the
// gradients, or the block's part of them. All threads come here; those without channels have zeros.
template <int kCount, int kWidth>
__device__ void add_up_threads(const DepthwiseConvWeightCall& call, const Place& place, int tap,
                               int count, const float (&sums)[kCount][kWidth]) {
  extern __shared__ float shared[];  // [count][width][threads]
  __syncthreads();
#pragma unroll
  for (int t = 0; t < kCount; ++t) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      shared[(t * kWidth + k) * blockDim.x + threadIdx.x] = sums[t][k];
    }
  }
  __syncthreads();
  const int channels = call.shape.pieces * kWidth;
  const int first = (place.piece - place.own) * kWidth;
  for (int i = threadIdx.x; i < count * channels; i += blockDim.x) {
    const int t = i / channels, own = i - t * channels, channel = first + own;
    if (channel >= call.shape.channels) continue;
    const float* values = shared + (t * kWidth + own % kWidth) * blockDim.x + own / kWidth;
    float sum = 0;
    for (int row = 0; row < place.rows; ++row) sum += values[row * call.shape.pieces];
    write_sum(call, place.set, tap + t, channel, sum);
  }
}

// Of an image, with as many taps each way as the template says: a thread has them all.
template <int kSize, int kStride>
__device__ void weight_gradient(const DepthwiseConvWeightCall& call) {
  constexpr int kRows = (kTileRows - 1) * kStride + kSize;
  constexpr int kColumns = (kTileColumns - 1) * kStride + kSize;
  const auto& shape = call.shape;
  const Place place(shape, kPair, blockIdx.x);
  const int height = shape.size[1], width = shape.size[2];
  float sums[kSize][kSize][kPair] = {}, of_bias[1][kPair] = {};
  const auto add_tile = [&](long long image, int down, int across) {
    const int row = down * kTileRows, column = across * kTileColumns;
    const int first = row * kStride - shape.padding[1];
    const int left = column * kStride - shape.padding[2];
    const Strip<kTileColumns> grad(call.grad_out, image, shape.out_size[1], shape.out_size[2],
                                   column, place);
    const Strip<kColumns> input(call.input, image, height, width, left, place);
    float grads[kTileRows][kTileColumns][kPair];
#pragma unroll
    for (int y = 0; y < kTileRows; ++y) {
      grad.read(row + y, grads[y], row + y < shape.out_size[1]);
#pragma unroll
      for (int x = 0; x < kTileColumns; ++x) {
#pragma unroll
        for (int k = 0; k < kPair; ++k) of_bias[0][k] += grads[y][x][k];
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool is_there = (unsigned)(first + r) < (unsigned)height;
      if (kSkipsRows<kSize> && !is_there) continue;
      float values[kColumns][kPair];
      input.read(first + r, values, is_there);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int y = 0; y < kTileRows; ++y) {
          const int tap = r - y * kStride;
          if (tap < 0 || tap >= kSize) continue;
#pragma unroll
          for (int x = 0; x < kTileColumns; ++x) {
            const int t = c - x * kStride;
            if (t < 0 || t >= kSize) continue;
            const float (&grad_of)[kPair] = grads[y][x];
            add_product(sums[tap][t], grad_of, values[c]);
          }
        }
      }
    }
  };
  if (place.piece < place.pieces) for_tiles(shape, place, add_tile);
#pragma unroll
  for (int tap = 0; tap < kSize; ++tap) {
    add_up_threads(call, place, tap * kSize, kSize, sums[tap]);
  }
  if (call.grad_bias != nullptr) add_up_threads(call, place, kSize * kSize, 1, of_bias);
}

// What one stretch of outputs adds to the gradients of the taps from `tap` on.
template <int kWidth>
__device__ void add_products(const DepthwiseConvShape& shape, const Row<kWidth>& input,
                             const Row<kWidth>& grad_out, int start, int tap,
                             float (&sums)[kTaps][kWidth]) {
  const int end = min(start + kStretch, shape.out_size[2]);
  const int padding = shape.padding[2], stride = shape.stride[2], dilation = shape.dilation[2];
  float grad[kWidth];
  if (stride == 1 && dilation == 1) {
    // The inputs of all taps at one output.
    float window[kTaps][kWidth];
#pragma unroll
    for (int t = 1; t < kTaps; ++t) input.read(start - padding + tap + t - 1, window[t]);
#pragma unroll 8
    for (int i = start; i < end; ++i) {
#pragma unroll
      for (int t = 0; t < kTaps - 1; ++t) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) window[t][k] = window[t + 1][k];
      }
      input.read(i - padding + tap + kTaps - 1, window[kTaps - 1]);
      grad_out.read(i, grad);
#pragma unroll
      for (int t = 0; t < kTaps; ++t) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) sums[t][k] = fmaf(grad[k], window[t][k], sums[t][k]);
      }
    }
    return;
  }
  for (int i = start; i < end; ++i) {
    grad_out.read(i, grad);
#pragma unroll
    for (int t = 0; t < kTaps; ++t) {
      float values[kWidth];
      input.read(i * stride - padding + (tap + t) * dilation, values);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sums[t][k] = fmaf(grad[k], values[k], sums[t][k]);
    }
  }
}

// Of any geometry: a block has kTaps of a row of taps, blockIdx.y says which, and tiles are
// stretches of outputs across, counted over depth and height. The first taps' blocks have the bias.
template <int kWidth>
__device__ void weight_gradient_any(const DepthwiseConvWeightCall& call) {
  const auto& shape = call.shape;
  const Place place(shape, kWidth, blockIdx.x);
  const int parts = (shape.taps[2] + kTaps - 1) / kTaps, row = (int)blockIdx.y / parts;
  const int tap = ((int)blockIdx.y - row * parts) * kTaps;
  const int d = row / shape.taps[1], h = row - d * shape.taps[1];
  const bool has_bias = blockIdx.y == 0 && call.grad_bias != nullptr;
  float sums[kTaps][kWidth] = {}, of_bias[1][kWidth] = {};
  const auto add_tile = [&](long long image, int line, int across) {
    const Row<kWidth> grad_out(call.grad_out, image * shape.tiles[0] + line, shape.out_size[2],
                               place);
    const int start = across * kStretch;
    for (int i = start; has_bias && i < min(start + kStretch, shape.out_size[2]); ++i) {
      float grad[kWidth];
      grad_out.read(i, grad);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) of_bias[0][k] += grad[k];
    }
    const int depth = line / shape.out_size[1], height = line - depth * shape.out_size[1];
    const int z = depth * shape.stride[0] - shape.padding[0] + d * shape.dilation[0];
    const int y = height * shape.stride[1] - shape.padding[1] + h * shape.dilation[1];
    if ((unsigned)z >= (unsigned)shape.size[0] || (unsigned)y >= (unsigned)shape.size[1]) return;
    const long long from = (image * shape.size[0] + z) * shape.size[1] + y;
    add_products(shape, Row<kWidth>(call.input, from, shape.size[2], place), grad_out, start, tap,
                 sums);
  };
  if (place.piece < place.pieces) for_tiles(shape, place, add_tile);
  add_up_threads(call, place, row * shape.taps[2] + tap, min(kTaps, shape.taps[2] - tap), sums);
  if (has_bias) add_up_threads(call, place, taps_of(shape), 1, of_bias);
}

__device__ void add_up(const DepthwiseConvWeightCall& call) {
  wait_for_inputs();
  const unsigned channels = call.shape.channels, taps = taps_of(call.shape);
  const unsigned all = taps + (call.grad_bias != nullptr ? 1 : 0);
  const auto write = [&](unsigned column, float sum) {
    write_gradient(call, taps, column / channels, column % channels, sum);
  };
  add_up_columns(call.partial, call.partials, all * channels, write);
}

}  // namespace

#define OF_SIZE(size, bounds)                                                                    \
  DEPTHWISE_CONV(weight_##size##_1, DepthwiseConvWeightCall, (weight_gradient<size, 1>), bounds) \
  DEPTHWISE_CONV(weight_##size##_2, DepthwiseConvWeightCall, (weight_gradient<size, 2>), bounds)

OF_SIZE(3, (128, 4))
OF_SIZE(5, (128, 4))
OF_SIZE(7, (128, 3))
DEPTHWISE_CONV(weight_pairs, DepthwiseConvWeightCall, weight_gradient_any<kPair>, (256))
DEPTHWISE_CONV(weight_singles, DepthwiseConvWeightCall, weight_gradient_any<1>, (256))
DEPTHWISE_CONV(add_up, DepthwiseConvWeightCall, add_up, (1024))
