// A norm by known statistics, act((x - mean) / deviation * weight + bias + residual), in one pass
// over memory, the signs of its results, a bit each, what its derivative adds up, and numbers of
// channels in another type. Compiled when the package is built (cmake/compile_kernels.py);
// batch_norm_cuda.cpp launches them.

#include "batch_norm_call.h"
#include "column_sums.cuh"
#include "number.cuh"
#include "threads.cuh"

// A thread asks memory for several pieces before it writes the first result.
constexpr int kAhead = 2;

template <class Type>
__device__ float read_vector(const BatchNormVector& vector, unsigned channel, float otherwise) {
  if (vector.data == nullptr) return otherwise;
  return vector.is_float ? ((const float*)vector.data)[channel]
                         : Type::read(((const typename Type::Bits*)vector.data)[channel]);
}

// What is done to the numbers of a channel. The mean is subtracted first: where it is far from 0,
// one factor and one summand would lose most digits.
struct Channel {
  float mean, factor, bias;

  template <class Type>
  static __device__ Channel of(const BatchNormApplyCall& call, unsigned channel) {
    const float spread = read_vector<Type>(call.spread, channel, 1);
    const float rstd = call.is_variance ? 1 / sqrtf(spread + call.eps) : spread;
    return {read_vector<Type>(call.mean, channel, 0),
            rstd * read_vector<Type>(call.weight, channel, 1),
            read_vector<Type>(call.bias, channel, 0)};
  }
  __device__ float norm(float value) const {
    return fmaf(value - mean, factor, bias);
  }
};

// A number that is none stays that.
__device__ float relu(float value) {
  return value < 0 ? 0 : value;
}

// Pieces `first`, `first + step`, ... below `end` of memory. `channel_of` gives what is done to
// each number of a piece: that of one channel, or of as many as a piece has numbers.
template <class Type, int kWidth, class ChannelOf>
__device__ void apply(const BatchNormApplyCall& call, long long first, long long step,
                      long long end, const ChannelOf& channel_of) {
  using Vector = Piece<Type, kWidth>;
  for (long long at = first; at < end; at += kAhead * step) {
    Vector input[kAhead], residual[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (at + i * step >= end) break;
      input[i] = ((const Vector*)call.input)[at + i * step];
      if (call.residual != nullptr) residual[i] = ((const Vector*)call.residual)[at + i * step];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (at + i * step >= end) break;
      float values[kWidth];
      input[i].read(values);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) values[k] = channel_of(k).norm(values[k]);
      if (call.residual != nullptr) residual[i].add_to(values);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (call.has_relu) values[k] = relu(values[k]);
      }
      ((Vector*)call.out)[at + i * step] = Vector::of(values);
    }
  }
}

// A block has some pieces of the channels, and as many pixels of them at once as it has threads
// for; then every gridDim.y-th such stretch of pixels.
template <class Type, int kWidth>
__device__ void apply_to_pixels(const BatchNormApplyCall& call) {
  const unsigned pixel_pieces = call.channels / kWidth, pixels = blockDim.x / call.pieces;
  const unsigned piece = blockIdx.x * call.pieces + threadIdx.x % call.pieces;
  if (piece >= pixel_pieces) return;
  Channel channels[kWidth];
#pragma unroll
  for (int k = 0; k < kWidth; ++k) channels[k] = Channel::of<Type>(call, piece * kWidth + k);
  const long long pixel = (long long)blockIdx.y * pixels + threadIdx.x / call.pieces;
  const long long step = (long long)gridDim.y * pixels;
  apply<Type, kWidth>(call, pixel * pixel_pieces + piece, step * pixel_pieces,
                      call.rows * pixel_pieces, [&](int k) { return channels[k]; });
}

// A block has every gridDim.x-th plane; those with the same share its positions.
template <class Type, int kWidth>
__device__ void apply_to_planes(const BatchNormApplyCall& call) {
  const long long plane_pieces = call.positions / kWidth;
  for (long long plane = blockIdx.x; plane < call.rows; plane += gridDim.x) {
    const Channel channel = Channel::of<Type>(call, (unsigned)(plane % call.channels));
    const long long start = plane * plane_pieces;
    apply<Type, kWidth>(call, start + (long long)blockIdx.y * blockDim.x + threadIdx.x,
                        (long long)gridDim.y * blockDim.x, start + plane_pieces,
                        [&](int) { return channel; });
  }
}

// A block has a channel, and every gridDim.y-th stretch of its pieces in all samples.
template <class Type, int kWidth>
__device__ void add_up_planes(const BatchNormSumsCall& call) {
  using Vector = Piece<Type, kWidth>;
  constexpr int kPieces = 4;  // that a thread asks memory for at once
  const unsigned channel = blockIdx.x;
  const float mean = call.mean[channel];
  const long long plane = call.positions / kWidth, step = (long long)gridDim.y * blockDim.x;
  const long long first = (long long)blockIdx.y * blockDim.x + threadIdx.x;
  // Divided once: pieces are few instructions each.
  const long long samples_of_step = step / plane, places_of_step = step % plane;
  long long sample = first / plane, place = first % plane;
  float sums[2] = {0, 0};
  while (sample < call.samples) {
    Vector grad[kPieces], input[kPieces];
    bool is_there[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      is_there[i] = sample < call.samples;
      if (is_there[i]) {
        const long long at = (sample * call.channels + channel) * plane + place;
        grad[i] = ((const Vector*)call.grad)[at];
        input[i] = ((const Vector*)call.input)[at];
      }
      sample += samples_of_step;
      place += places_of_step;
      if (place >= plane) place -= plane, ++sample;
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (!is_there[i]) break;
      float grads[kWidth], inputs[kWidth];
      grad[i].read(grads);
      input[i].read(inputs);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        sums[0] += grads[k];
        sums[1] = fmaf(grads[k], inputs[k] - mean, sums[1]);
      }
    }
  }
  __shared__ float scratch[2][32];
  sum_up(sums, blockDim.x, scratch);
  if (threadIdx.x > 0) return;
#pragma unroll
  for (unsigned i = 0; i < 2; ++i) {
    call.partial[(2LL * blockIdx.y + i) * call.channels + channel] = sums[i];
  }
}

// Row blockIdx.y of blocks has a copy.
template <class Type>
__device__ void copy_vectors(const BatchNormCopyCall& call) {
  const unsigned channel = blockIdx.x * blockDim.x + threadIdx.x;
  if (channel >= call.channels) return;
  const auto& copy = call.copies[blockIdx.y];
  const float value = read_vector<Type>(copy.from, channel, copy.otherwise);
  if (copy.is_to_float) {
    ((float*)copy.to)[channel] = value;
  } else {
    ((typename Type::Bits*)copy.to)[channel] = Type::write(value);
  }
}

// Whether numbers are above 0, eight of them to a byte, the first one in its lowest bit.
template <class Type>
__device__ void find_signs(const BatchNormSignsCall& call) {
  using Vector = Piece<Type, 8>;
  const long long step = (long long)gridDim.x * blockDim.x;
  long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
#pragma unroll 4
  for (; at < call.pieces; at += step) {
    float values[8];
    ((const Vector*)call.images)[at].read(values);
    unsigned bits = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) bits |= (values[k] > 0 ? 1U : 0U) << k;
    call.signs[at] = (unsigned char)bits;
  }
}

#define APPLY(Type, suffix, width)                                                            \
  extern "C" __global__ void __launch_bounds__(512, 2)                                        \
      batch_norm_pixels_##suffix##_##width(const __grid_constant__ BatchNormApplyCall call) { \
    apply_to_pixels<Type, width>(call);                                                       \
  }                                                                                           \
  extern "C" __global__ void __launch_bounds__(512, 2)                                        \
      batch_norm_planes_##suffix##_##width(const __grid_constant__ BatchNormApplyCall call) { \
    apply_to_planes<Type, width>(call);                                                       \
  }
#define SUMS(Type, suffix, width)                                                          \
  extern "C" __global__ void __launch_bounds__(512)                                        \
      batch_norm_sums_##suffix##_##width(const __grid_constant__ BatchNormSumsCall call) { \
    add_up_planes<Type, width>(call);                                                      \
  }
#define OF_16_BITS(Type, suffix)                                                   \
  extern "C" __global__ void __launch_bounds__(256)                                \
      batch_norm_copy_##suffix(const __grid_constant__ BatchNormCopyCall call) {   \
    copy_vectors<Type>(call);                                                      \
  }                                                                                \
  extern "C" __global__ void __launch_bounds__(256)                                \
      batch_norm_signs_##suffix(const __grid_constant__ BatchNormSignsCall call) { \
    find_signs<Type>(call);                                                        \
  }

APPLY(Half, half, 8)
APPLY(Half, half, 1)
APPLY(BFloat16, bfloat16, 8)
APPLY(BFloat16, bfloat16, 1)
APPLY(Float, float, 4)
APPLY(Float, float, 1)
SUMS(Half, half, 8)
SUMS(Half, half, 1)
SUMS(BFloat16, bfloat16, 8)
SUMS(BFloat16, bfloat16, 1)
SUMS(Float, float, 4)
SUMS(Float, float, 1)
OF_16_BITS(Half, half)
OF_16_BITS(BFloat16, bfloat16)

extern "C" __global__ void __launch_bounds__(1024)
    batch_norm_add_up(const __grid_constant__ BatchNormSumsCall call) {
  add_up_columns(call.partial, call.stretches, 2 * call.channels,
                 [&](unsigned column, float sum) { call.sums[column] = sum; });
}
