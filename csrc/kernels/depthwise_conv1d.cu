// Depthwise convolutions of one dimension, each channel with a kernel of its own: the forward with
// its epilogue, activation(conv + bias + residual), which with the taps turned around is the
// gradient of the input too; and the gradient of the weight. In float32. For tensors that have the
// channels last in memory, and for those that have the length last ("rows"). Compiled when the
// package is built (cmake/compile_kernels.py); depthwise_conv1d_cuda.cpp launches them.

#include "activation.cuh"
#include "activation_list.h"
#include "column_sums.cuh"
#include "depthwise_conv1d_call.h"
#include "number.cuh"

namespace {

#define ENUMERATOR(name, Name) k##Name,
enum : int { CUDNN_OPS_ACTIVATIONS(ENUMERATOR) };
#undef ENUMERATOR

// Outputs that a thread computes together. Where the channels are last and the stride is 1 they
// follow each other: of each input that it reads it makes as many products.
constexpr int kRun = 8;
// Taps of the weight whose gradients a thread computes together, and outputs in a row that it adds
// up before it goes on to others.
constexpr int kTaps = 8, kStretch = 32;
// The same of threads that share a row.
constexpr int kChunk = 4096;

// A thread's channels, of all of a tensor's positions in one sample.
template <class Type, int kWidth>
struct Column {
  using Vector = Piece<Type, kWidth>;
  const Vector* first;
  int length, step;  // in positions; from one to the next

  __device__ Column(const void* data, const DepthwiseConv1dShape& shape, long long sample,
                    int length, int piece)
      : first((const Vector*)data + sample * length * (shape.channels / kWidth) + piece),
        length(length),
        step(shape.channels / kWidth) {
  }
  // Zeros beyond either end.
  __device__ void read(int at, float (&values)[kWidth]) const {
    if ((unsigned)at < (unsigned)length) {
      first[(long long)at * step].read(values);
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) values[k] = 0;
    }
  }
};

// What comes after the convolution, for the `count` outputs of a run that exist.
template <class Type, class Activation, int kWidth>
__device__ void finish(const DepthwiseConv1dCall& call, float (&sums)[kRun][kWidth],
                       const float (&bias)[kWidth], long long index, int step, int count) {
  using Vector = Piece<Type, kWidth>;
#pragma unroll
  for (int r = 0; r < kRun; ++r, index += step) {
    if (r >= count) return;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sums[r][k] += bias[k];
    if (call.residual != nullptr) {
      float residual[kWidth];
      ((const Vector*)call.residual)[index].read(residual);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sums[r][k] += residual[k];
    }
    if (call.before != nullptr) ((Vector*)call.before)[index] = Vector::of(sums[r]);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sums[r][k] = Activation::of(sums[r][k]).x;
    ((Vector*)call.out)[index] = Vector::of(sums[r]);
  }
}

template <class Type, int kWidth>
__device__ void finish_run(const DepthwiseConv1dCall& call, float (&sums)[kRun][kWidth],
                           const float (&bias)[kWidth], long long index, int step, int count) {
  switch (call.activation) {
#define CASE(name, Name) \
  case k##Name: finish<Type, Name, kWidth>(call, sums, bias, index, step, count); break;
    CUDNN_OPS_ACTIVATIONS(CASE)
#undef CASE
  }
}

template <class Type, int kWidth>
__device__ void add_taps(const DepthwiseConv1dCall& call, const Column<Type, kWidth>& input,
                         int piece, int start, float (&sums)[kRun][kWidth]) {
  const auto& shape = call.shape;
  const auto* weight = (const typename Type::Bits*)call.weight + piece * kWidth * shape.taps;
  const auto read_weight = [&](int tap, float (&values)[kWidth]) {
    const int at = call.is_turned ? shape.taps - 1 - tap : tap;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] = Type::read(weight[k * shape.taps + at]);
  };
  const int first = start * shape.stride - shape.padding;
  float taps[kWidth];
  if (shape.stride == 1 && shape.dilation == 1) {
    // The inputs of all outputs of the run at one tap; for the next tap they move on by one.
    float window[kRun][kWidth];
#pragma unroll
    for (int r = 1; r < kRun; ++r) input.read(first + r - 1, window[r]);
#pragma unroll 8
    for (int tap = 0; tap < shape.taps; ++tap) {
#pragma unroll
      for (int r = 0; r < kRun - 1; ++r) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) window[r][k] = window[r + 1][k];
      }
      input.read(first + tap + kRun - 1, window[kRun - 1]);
      read_weight(tap, taps);
#pragma unroll
      for (int r = 0; r < kRun; ++r) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) sums[r][k] += taps[k] * window[r][k];
      }
    }
    return;
  }
  for (int tap = 0; tap < shape.taps; ++tap) {
    read_weight(tap, taps);
#pragma unroll
    for (int r = 0; r < kRun; ++r) {
      float values[kWidth];
      input.read(first + r * shape.stride + tap * shape.dilation, values);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sums[r][k] += taps[k] * values[k];
    }
  }
}

// A block has some pieces of the channels, and as many runs of outputs of them at once as it has
// threads for; then every gridDim.y-th such set of runs.
template <class Type, int kWidth>
__device__ void forward(const DepthwiseConv1dCall& call) {
  const auto& shape = call.shape;
  const int pieces = shape.channels / kWidth, rows = blockDim.x / shape.pieces;
  const int piece = blockIdx.x * shape.pieces + threadIdx.x % shape.pieces;
  if (piece >= pieces) return;
  float bias[kWidth] = {};
  if (call.bias != nullptr) ((const Piece<Type, kWidth>*)call.bias)[piece].read(bias);
  const int runs = (shape.out_length + kRun - 1) / kRun;  // of a sample
  const long long all = shape.batch * runs, step = (long long)gridDim.y * rows;
  for (long long run = (long long)blockIdx.y * rows + threadIdx.x / shape.pieces; run < all;
       run += step) {
    const long long sample = run / runs;
    const int start = (int)(run - sample * runs) * kRun;
    float sums[kRun][kWidth] = {};
    add_taps(call, Column<Type, kWidth>(call.input, shape, sample, shape.length, piece), piece,
             start, sums);
    const long long index = (sample * shape.out_length + start) * pieces + piece;
    finish_run<Type, kWidth>(call, sums, bias, index, pieces, shape.out_length - start);
  }
}

// What one stretch of outputs adds to the gradients of the taps from `tap` on.
template <class Type, int kWidth>
__device__ void add_products(const DepthwiseConv1dShape& shape, const Column<Type, kWidth>& input,
                             const Column<Type, kWidth>& grad_out, int start, int tap,
                             float (&sums)[kTaps][kWidth]) {
  const int end = min(start + kStretch, shape.out_length);
  float grad[kWidth];
  if (shape.stride == 1 && shape.dilation == 1) {
    // The inputs of all taps at one output.
    float window[kTaps][kWidth];
    const int first = start - shape.padding + tap;
#pragma unroll
    for (int t = 1; t < kTaps; ++t) input.read(first + t - 1, window[t]);
#pragma unroll 8
    for (int i = start; i < end; ++i) {
#pragma unroll
      for (int t = 0; t < kTaps - 1; ++t) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) window[t][k] = window[t + 1][k];
      }
      input.read(i - shape.padding + tap + kTaps - 1, window[kTaps - 1]);
      grad_out.read(i, grad);
#pragma unroll
      for (int t = 0; t < kTaps; ++t) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) sums[t][k] += grad[k] * window[t][k];
      }
    }
    return;
  }
  for (int i = start; i < end; ++i) {
    grad_out.read(i, grad);
#pragma unroll
    for (int t = 0; t < kTaps; ++t) {
      float values[kWidth];
      input.read(i * shape.stride - shape.padding + (tap + t) * shape.dilation, values);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sums[t][k] += grad[k] * values[k];
    }
  }
}

// As forward(), with stretches of outputs; a block has kTaps of the taps.
template <class Type, int kWidth>
__device__ void of_weight(const DepthwiseConv1dWeightCall& call) {
  extern __shared__ float shared[];  // [width][threads]
  const auto& shape = call.shape;
  const int pieces = shape.channels / kWidth, rows = blockDim.x / shape.pieces;
  const int strips = (pieces + shape.pieces - 1) / shape.pieces;
  const int strip = blockIdx.x % strips, tap = blockIdx.x / strips * kTaps;
  const int piece = strip * shape.pieces + threadIdx.x % shape.pieces;
  float sums[kTaps][kWidth] = {};
  if (piece < pieces) {
    const int stretches = (shape.out_length + kStretch - 1) / kStretch;  // of a sample
    const long long all = shape.batch * stretches, step = (long long)gridDim.y * rows;
    for (long long at = (long long)blockIdx.y * rows + threadIdx.x / shape.pieces; at < all;
         at += step) {
      const long long sample = at / stretches;
      add_products(shape, Column<Type, kWidth>(call.input, shape, sample, shape.length, piece),
                   Column<Type, kWidth>(call.grad_out, shape, sample, shape.out_length, piece),
                   (int)(at - sample * stretches) * kStretch, tap, sums);
    }
  }
#pragma unroll
  for (int t = 0; t < kTaps; ++t) {
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kWidth; ++k) shared[k * blockDim.x + threadIdx.x] = sums[t][k];
    __syncthreads();
    if (tap + t >= shape.taps) continue;  // for all threads
    for (int i = threadIdx.x; i < shape.pieces * kWidth; i += blockDim.x) {
      const int channel = strip * shape.pieces * kWidth + i;
      if (channel >= shape.channels) continue;
      const float* values = shared + i % kWidth * blockDim.x + i / kWidth;
      float sum = 0;
      for (int row = 0; row < rows; ++row) sum += values[row * shape.pieces];
      call.partial[((long long)blockIdx.y * shape.channels + channel) * shape.taps + tap + t] = sum;
    }
  }
}

// One channel of one sample, the length last.
template <class Type>
struct Row {
  const typename Type::Bits* first;
  int length;

  __device__ Row(const void* data, long long row, int length)
      : first((const typename Type::Bits*)data + row * length), length(length) {
  }
  // Zero beyond either end.
  __device__ float operator[](int at) const {
    return (unsigned)at < (unsigned)length ? Type::read(first[at]) : 0;
  }
};

// `pieces` threads share the outputs of a row, each with some that lie as far apart; a block has as
// many rows as it has threads for.
template <class Type>
__device__ void rows_forward(const DepthwiseConv1dCall& call) {
  const auto& shape = call.shape;
  const int lanes = shape.pieces, lane = threadIdx.x % lanes;
  const long long row = (long long)blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes;
  if (row >= shape.batch * shape.channels) return;
  const int channel = (int)(row % shape.channels);
  const Row<Type> input(call.input, row, shape.length);
  const auto* weight = (const typename Type::Bits*)call.weight + (long long)channel * shape.taps;
  float bias[1] = {};
  if (call.bias != nullptr) bias[0] = Type::read(((const typename Type::Bits*)call.bias)[channel]);
  const int step = gridDim.y * lanes * kRun;
  for (int start = blockIdx.y * lanes * kRun + lane; start < shape.out_length; start += step) {
    float sums[kRun][1] = {};
#pragma unroll 2
    for (int tap = 0; tap < shape.taps; ++tap) {
      const float factor = Type::read(weight[call.is_turned ? shape.taps - 1 - tap : tap]);
      const int first = start * shape.stride - shape.padding + tap * shape.dilation;
#pragma unroll
      for (int r = 0; r < kRun; ++r) sums[r][0] += factor * input[first + r * lanes * shape.stride];
    }
    const int count = (shape.out_length - start + lanes - 1) / lanes;
    finish_run<Type, 1>(call, sums, bias, row * shape.out_length + start, lanes, count);
  }
}

// A block has kTaps of a channel's taps and every gridDim.y-th set of chunks of that channel's
// rows, as many chunks at once as it has threads for.
template <class Type>
__device__ void rows_of_weight(const DepthwiseConv1dWeightCall& call) {
  __shared__ float by_warp[8][kTaps];
  const auto& shape = call.shape;
  const int channel = blockIdx.x % shape.channels, tap = blockIdx.x / shape.channels * kTaps;
  const int lanes = shape.pieces, lane = threadIdx.x % lanes, at_once = blockDim.x / lanes;
  const int chunks = (shape.out_length + kChunk - 1) / kChunk;  // of a row
  const long long all = shape.batch * chunks, step = (long long)gridDim.y * at_once;
  float sums[kTaps] = {};
  for (long long chunk = (long long)blockIdx.y * at_once + threadIdx.x / lanes; chunk < all;
       chunk += step) {
    const long long sample = chunk / chunks;
    const long long row = sample * shape.channels + channel;
    const Row<Type> input(call.input, row, shape.length);
    const Row<Type> grad_out(call.grad_out, row, shape.out_length);
    const int start = (int)(chunk - sample * chunks) * kChunk;
    const int end = min(start + kChunk, shape.out_length);
#pragma unroll 2
    for (int i = start + lane; i < end; i += lanes) {
      const float grad = grad_out[i];
      const int first = i * shape.stride - shape.padding + tap * shape.dilation;
#pragma unroll
      for (int t = 0; t < kTaps; ++t) sums[t] += grad * input[first + t * shape.dilation];
    }
  }
#pragma unroll
  for (int t = 0; t < kTaps; ++t) {
#pragma unroll
    for (int other = 16; other > 0; other /= 2) {
      sums[t] += __shfl_xor_sync(0xffffffff, sums[t], other);
    }
    if (threadIdx.x % 32 == 0) by_warp[threadIdx.x / 32][t] = sums[t];
  }
  __syncthreads();
  if (threadIdx.x >= kTaps || tap + (int)threadIdx.x >= shape.taps) return;
  float sum = 0;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += by_warp[warp][threadIdx.x];
  const long long at = (long long)channel * shape.taps + tap + threadIdx.x;
  call.partial[(long long)blockIdx.y * shape.channels * shape.taps + at] = sum;
}

}  // namespace

#define KERNEL(name, Call, function)                               \
  extern "C" __global__ void __launch_bounds__(256)                \
      depthwise_conv1d_##name(const __grid_constant__ Call call) { \
    function(call);                                                \
  }

#define KERNELS(Type, suffix, width)                                                             \
  KERNEL(suffix##_1, DepthwiseConv1dCall, (forward<Type, 1>))                                    \
  KERNEL(suffix##_##width, DepthwiseConv1dCall, (forward<Type, width>))                          \
  KERNEL(rows_##suffix, DepthwiseConv1dCall, rows_forward<Type>)                                 \
  KERNEL(weight_##suffix##_1, DepthwiseConv1dWeightCall, (of_weight<Type, 1>))                   \
  KERNEL(weight_##suffix##_##width, DepthwiseConv1dWeightCall, (of_weight<Type, width>))         \
  KERNEL(weight_rows_##suffix, DepthwiseConv1dWeightCall, rows_of_weight<Type>)                  \
  extern "C" __global__ void __launch_bounds__(1024)                                             \
      depthwise_conv1d_add_up_##suffix(const __grid_constant__ DepthwiseConv1dWeightCall call) { \
    const auto write = [&](unsigned column, float sum) {                                         \
      ((Type::Bits*)call.grad_weight)[column] = Type::write(sum);                                \
    };                                                                                           \
    add_up_columns(call.partial, call.partials, call.shape.channels * call.shape.taps, write);   \
  }

KERNELS(Half, half, 4)
KERNELS(BFloat16, bfloat16, 4)
KERNELS(Float, float, 2)
