// Depthwise convolutions of one dimension, each channel with a kernel of its own, the channels last
// in memory: the forward with its epilogue, activation(conv + bias + residual), which with the taps
// turned around is the gradient of the input too, where the stride is 1; and the gradients. In
// float32. Those of tensors that have the length last are in depthwise_conv1d_rows.cu, but for the
// gradient of the input with a stride. Compiled when the package is built
// (cmake/compile_kernels.py); depthwise_conv1d_cuda.cpp launches them.

#include "depthwise_conv1d.cuh"

namespace {

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
      write_sum<Type>(call, (long long)channel * shape.taps + tap + t, sum);
    }
  }
}

// The gradient of the input where the stride is not 1; the call's input is that of the output, and
// its shape's lengths are those of the convolution. A number of it is the sum of weight[k] times
// the output at (i + padding - k * dilation) / stride, for the taps k where that is whole: every
// `pieces`-th one.
template <class Type, bool kIsLengthLast>
__device__ void of_strided_input(const DepthwiseConv1dCall& call) {
  using Bits = typename Type::Bits;
  const auto& shape = call.shape;
  const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned inner = kIsLengthLast ? shape.length : shape.channels;
  if (index >= (unsigned)shape.length * shape.channels) return;
  const int channel = (int)(kIsLengthLast ? index / inner : index % inner);
  const int seen = (int)(kIsLengthLast ? index % inner : index / inner) + shape.padding;
  const int least = min(shape.pieces, shape.taps);
  int first = 0;
  while (first < least && (seen - first * shape.dilation) % shape.stride != 0) ++first;
  const int last = (seen - first * shape.dilation) / shape.stride;
  const auto* weight = (const Bits*)call.weight + (long long)channel * shape.taps;
  const long long step = kIsLengthLast ? 1 : shape.channels;
  for (long long sample = blockIdx.y; sample < shape.batch; sample += gridDim.y) {
    const auto* grad = (const Bits*)call.input + sample * shape.out_length * shape.channels +
                       (kIsLengthLast ? (long long)channel * shape.out_length : channel);
    float sum = 0;
    for (int tap = first < least ? first : shape.taps, at = last; tap < shape.taps;
         tap += shape.pieces, at -= shape.back) {
      if ((unsigned)at < (unsigned)shape.out_length) {
        sum += Type::read(weight[tap]) * Type::read(grad[at * step]);
      }
    }
    ((Bits*)call.out)[sample * shape.length * shape.channels + index] = Type::write(sum);
  }
}

}  // namespace

#define KERNELS(Type, suffix, width)                                                             \
  KERNEL(suffix##_1, DepthwiseConv1dCall, (forward<Type, 1>), (256))                             \
  KERNEL(suffix##_##width, DepthwiseConv1dCall, (forward<Type, width>), (256))                   \
  KERNEL(weight_##suffix##_1, DepthwiseConv1dWeightCall, (of_weight<Type, 1>), (256))            \
  KERNEL(weight_##suffix##_##width, DepthwiseConv1dWeightCall, (of_weight<Type, width>), (256))  \
  KERNEL(input_##suffix, DepthwiseConv1dCall, (of_strided_input<Type, false>), (256))            \
  KERNEL(input_rows_##suffix, DepthwiseConv1dCall, (of_strided_input<Type, true>), (256))        \
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
