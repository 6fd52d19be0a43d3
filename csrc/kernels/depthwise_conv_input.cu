// The gradient of a depthwise convolution's input where a stride is not 1; the call's input is the
// gradient of the output, and its shape's sizes are those of the convolution. A number of it is the
// sum of weight[k] times the output at (i + padding - k * dilation) / stride, for the taps k where
// that is whole. Compiled when the package is built (cmake/compile_kernels.py);
// depthwise_conv_cuda.cpp launches it.

#include "depthwise_conv.cuh"

namespace {

template <int kWidth>
__device__ void write(void* data, long long index, const float (&values)[kWidth]) {
  ((Piece<Type, kWidth>*)data)[index] = Piece<Type, kWidth>::of(values);
}

// Of an image, with a stride of 2 both ways. A tile begins at an even number of zeros and pixels,
// so that which taps reach which of its pixels is known: those as even or odd as they are.
template <int kSize>
__device__ void input_gradient(const DepthwiseConvCall& call) {
  constexpr int kHalf = kStridedColumns / 2, kReach = (kSize - 1) / 2;
  const auto& shape = call.shape;
  const Place place(shape, kPair, blockIdx.x);
  const Taps<kSize * kSize> taps(call, place);
  if (place.piece >= place.pieces) return;
  const int height = shape.size[1], width = shape.size[2];
  for_tiles(shape, place, [&](long long image, int down, int across) {
    // The outputs that the first tap reaches the tile's first pixel from.
    const int row = down + shape.padding[1] / 2, column = across * kHalf + shape.padding[2] / 2;
    const Strip<kHalf + kReach> grad(call.input, image, shape.out_size[1], shape.out_size[2],
                                     column - kReach, place);
    float sums[kStridedRows][kStridedColumns][kPair] = {};
#pragma unroll
    for (int r = 0; r <= kReach; ++r) {
      const bool is_there = (unsigned)(row - r) < (unsigned)shape.out_size[1];
      if (kSkipsRows<kSize> && !is_there) continue;
      float values[kHalf + kReach][kPair];
      grad.read(row - r, values, is_there);
#pragma unroll
      for (int y = 0; y < kStridedRows; ++y) {
        const int tap = 2 * r + y;
        if (tap >= kSize) continue;
#pragma unroll
        for (int t = 0; t < kSize; ++t) {
          const auto weight = taps[tap * kSize + t];
#pragma unroll
          for (int x = 0; x < kHalf; ++x) {
            add_product(sums[y][2 * x + t % 2], weight.channels, values[x - t / 2 + kReach]);
          }
        }
      }
    }
    const int top = 2 * row - shape.padding[1], left = 2 * column - shape.padding[2];
#pragma unroll
    for (int y = 0; y < kStridedRows; ++y) {
      if ((unsigned)(top + y) >= (unsigned)height) continue;
      const long long index =
          ((image * height + top + y) * width + left) * place.pieces + place.piece;
#pragma unroll
      for (int x = 0; x < kStridedColumns; ++x) {
        if ((unsigned)(left + x) >= (unsigned)width) continue;
        write(call.out, index + (long long)x * place.pieces, sums[y][x]);
      }
    }
  });
}

// The output that a tap of one dimension reaches position `at` from; -1 where there is none.
__device__ int output_of(const DepthwiseConvShape& shape, int dim, int at, int tap) {
  const int from = at + shape.padding[dim] - tap * shape.dilation[dim];
  const int output = from / shape.stride[dim];
  const bool is_there =
      from >= 0 && output * shape.stride[dim] == from && output < shape.out_size[dim];
  return is_there ? output : -1;
}

// Of any geometry: tiles are single pixels, counted over depth and height.
template <int kWidth>
__device__ void input_gradient_any(const DepthwiseConvCall& call) {
  const auto& shape = call.shape;
  const Place place(shape, kWidth, blockIdx.x);
  if (place.piece >= place.pieces) return;
  const int all = shape.taps[0] * shape.taps[1] * shape.taps[2];
  const auto* weight = (const Bits*)call.weight + (long long)place.piece * kWidth * all;
  for_tiles(shape, place, [&](long long image, int line, int across) {
    const int depth = line / shape.size[1], height = line - depth * shape.size[1];
    float sums[kWidth] = {};
    for (int d = 0; d < shape.taps[0]; ++d) {
      const int z = output_of(shape, 0, depth, d);
      if (z < 0) continue;
      for (int h = 0; h < shape.taps[1]; ++h) {
        const int y = output_of(shape, 1, height, h);
        if (y < 0) continue;
        const long long row = (image * shape.out_size[0] + z) * shape.out_size[1] + y;
        const Row<kWidth> grad(call.input, row, shape.out_size[2], place);
        for (int w = 0; w < shape.taps[2]; ++w) {
          const int x = output_of(shape, 2, across, w);
          if (x < 0) continue;
          float values[kWidth];
          grad.read(x, values);
          const int tap = (d * shape.taps[1] + h) * shape.taps[2] + w;
#pragma unroll
          for (int k = 0; k < kWidth; ++k) {
            sums[k] = fmaf(Type::read(weight[k * all + tap]), values[k], sums[k]);
          }
        }
      }
    }
    const long long index = (image * shape.tiles[0] + line) * shape.size[2] + across;
    write(call.out, index * place.pieces + place.piece, sums);
  });
}

}  // namespace

DEPTHWISE_CONV(input_3, DepthwiseConvCall, input_gradient<3>, (256, 2))
DEPTHWISE_CONV(input_5, DepthwiseConvCall, input_gradient<5>, (256, 2))
DEPTHWISE_CONV(input_7, DepthwiseConvCall, input_gradient<7>, (256, 2))
DEPTHWISE_CONV(input_pairs, DepthwiseConvCall, input_gradient_any<kPair>, (256))
DEPTHWISE_CONV(input_singles, DepthwiseConvCall, input_gradient_any<1>, (256))
