// The gradients of a depthwise convolution's weight and bias as in depthwise_conv_weight.cu, by
// blocks that have whole images in shared memory, or parts of larger ones: one while they compute,
// and the next on its way. A thread has one row of the taps. Compiled when the package is built
// (cmake/compile_kernels.py); depthwise_conv_whole_cuda.cpp launches it.

#include "depthwise_conv_gradients.cuh"
#include "depthwise_conv_whole.cuh"
#include "threads.cuh"

namespace {

// Rows of kColumns numbers of the output's gradient, and of the input for them: kStride times as
// many to a row in whole images, and in parts all that the taps reach.
template <int kSize, int kStride, int kColumns, bool kIsPart>
struct Buffer {
  static constexpr int kPixels = kIsPart ? kColumns + kSize - 1 : kStride * kColumns;
  const DepthwiseConvShape& shape;
  WholeImages<kPixels> inputs;
  WholeImages<kColumns> grads;
  int rows, out_rows;

  // The one of the block's two.
  __device__ Buffer(const DepthwiseConvShape& shape, const Place& place, int which)
      : shape(shape),
        inputs(shape, place, shape.spread),
        grads(shape, place, 0),
        rows(kIsPart ? shape.stretch + kSize - 1 : shape.size[1]),
        out_rows(kIsPart ? shape.stretch : shape.out_size[1]) {
    extern __shared__ float shared[];
    const int input = inputs.line * rows, both = input + grads.line * out_rows;
    inputs.images = (Words<kPair>*)shared + which * both;
    grads.images = inputs.images + input;
  }
  // Sends for an image, or a part; these are counted across, then down, then from image to image.
  __device__ void load(const DepthwiseConvWeightCall& call, long long which) const {
    if constexpr (kIsPart) {
      const int parts = shape.tiles[0] * shape.tiles[1];
      const long long image = which / parts;
      const int part = (int)(which - image * parts), down = part / shape.tiles[1];
      const int row = down * out_rows, column = (part - down * shape.tiles[1]) * kColumns;
      inputs.load_part(call.input, image, shape.size, row - shape.padding[1],
                       column - shape.padding[2], rows);
      grads.load_part(call.grad_out, image, shape.out_size, row, column, out_rows);
    } else {
      inputs.load(call.input, which * rows, rows);
      grads.load(call.grad_out, which * out_rows, out_rows);
    }
    commit_copies();
  }
  // Where in it the input is that a row of the taps meets at a row of outputs; negative or beyond
  // the end where there is none.
  __device__ int row_of(int out_row, int tap) const {
    return kIsPart ? out_row + tap : out_row * kStride - shape.padding[1] + tap;
  }
};

template <int kSize, int kStride, int kColumns, bool kIsPart = false>
__device__ void weight_gradient(const DepthwiseConvWeightCall& call) {
  using Images = Buffer<kSize, kStride, kColumns, kIsPart>;
  constexpr int kPixels = Images::kPixels, kBefore = kIsPart ? 0 : kSize / 2;
  wait_for_inputs();
  const auto& shape = call.shape;
  const Place place(shape, kPair, blockIdx.x);
  // Of the rows of outputs, the threads with one row of the taps have each a share.
  const int tap = place.row % kSize, share = place.row / kSize, shares = place.rows / kSize;
  const long long units = shape.batch * (kIsPart ? shape.tiles[0] * shape.tiles[1] : 1);
  const long long first = place.set * shape.turns;
  const int count = (int)min((long long)shape.turns, units - first);
  const auto buffer = [&](int i) { return Images(shape, place, i % 2); };
  // As many of a row of taps, and the bias.
  float sums[kSize + 1][kPair] = {};
  buffer(0).load(call, first);
  for (int i = 0; i < count; ++i) {
    if (i + 1 < count) {
      buffer(i + 1).load(call, first + i + 1);
      wait_for_all_but<1>();
    } else {
      wait_for_copies();
    }
    __syncthreads();
    const auto images = buffer(i);
    for (int y = share; y < images.out_rows && place.piece < place.pieces; y += shares) {
      const int row = images.row_of(y, tap);
      const bool is_there = (unsigned)row < (unsigned)images.rows;
      if (!is_there && tap > 0) continue;
      float grads[kColumns][kPair], values[kPixels][kPair];
      images.grads.read(y, grads);
      if (tap == 0) {
#pragma unroll
        for (int x = 0; x < kColumns; ++x) {
#pragma unroll
          for (int k = 0; k < kPair; ++k) sums[kSize][k] += grads[x][k];
        }
        if (!is_there) continue;
      }
      images.inputs.read(row, values);
#pragma unroll
      for (int x = 0; x < kColumns; ++x) {
#pragma unroll
        for (int t = 0; t < kSize; ++t) {
          const int column = x * kStride + t - kBefore;
          if (column >= 0 && column < kPixels) add_product(sums[t], grads[x], values[column]);
        }
      }
    }
    __syncthreads();
  }
  extern __shared__ float shared[];  // [kSize + 1][kPair][threads]
#pragma unroll
  for (int t = 0; t <= kSize; ++t) {
#pragma unroll
    for (int k = 0; k < kPair; ++k) {
      shared[(t * kPair + k) * blockDim.x + threadIdx.x] = sums[t][k];
    }
  }
  let_next_start();
  __syncthreads();
  const int channels = shape.pieces * kPair, begin = (place.piece - place.own) * kPair;
  const int all = kSize * kSize + (call.grad_bias != nullptr ? 1 : 0);
  for (int i = threadIdx.x; i < all * channels; i += blockDim.x) {
    const int index = i / channels, own = i - index * channels;
    if (begin + own >= shape.channels) continue;
    const bool is_bias = index == kSize * kSize;
    const int row = is_bias ? 0 : index / kSize, t = is_bias ? kSize : index - row * kSize;
    const float* values =
        shared + (t * kPair + own % kPair) * blockDim.x + row * shape.pieces + own / kPair;
    float sum = 0;
    for (int p = 0; p < shares; ++p) sum += values[p * kSize * shape.pieces];
    write_sum(call, place.set, index, begin + own, sum);
  }
}

}  // namespace

#define WHOLE(size, stride, columns)                                                  \
  DEPTHWISE_CONV(whole_weight_##size##_##stride##_##columns, DepthwiseConvWeightCall, \
                 (weight_gradient<size, stride, columns>), (kWholeThreads, kWholeBlocks))
WHOLE_SIZES(WHOLE)

#define PARTS(size)                                                          \
  DEPTHWISE_CONV(weight_parts_##size, DepthwiseConvWeightCall,               \
                 (weight_gradient<size, 1, kPartColumns, /*kIsPart=*/true>), \
                 (kWholeThreads, kWholeBlocks))
PARTS(5)
PARTS(7)
