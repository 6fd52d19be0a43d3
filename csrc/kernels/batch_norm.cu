// A norm by known statistics, act((x - mean) / deviation * weight + bias + residual), in one pass
// over memory, what its derivative adds up where channels are planes, and numbers of channels in
// another type. Compiled when the package is built (cmake/compile_kernels.py);
// batch_norm_cuda.cpp launches them.

#include "batch_norm.cuh"
#include "column_sums.cuh"
#include "threads.cuh"

// The pieces at `at`, `at + step`, ..., kCount of them, which all exist.
template <class Type, int kWidth, int kCount, bool kHasResidual, class ChannelOf>
__device__ void apply_some(const BatchNormApplyCall& call, long long at, long long step,
                           const ChannelOf& channel_of) {
  using Vector = Piece<Type, kWidth>;
  Vector input[kCount], residual[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    input[i] = ((const Vector*)call.input)[at + i * step];
    if (kHasResidual) residual[i] = ((const Vector*)call.residual)[at + i * step];
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float values[kWidth];
    input[i].read(values);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] = channel_of(k).norm(values[k]);
    if (kHasResidual) residual[i].add_to(values);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      if (call.has_relu) values[k] = relu(values[k]);
    }
    ((Vector*)call.out)[at + i * step] = Vector::of(values);
  }
}

template <class Type, int kWidth, bool kHasResidual, class ChannelOf>
__device__ void apply(const BatchNormApplyCall& call, long long at, long long step, long long end,
                      const ChannelOf& channel_of) {
  constexpr int kAhead = kHasResidual ? 2 : 4;  // that a thread asks memory for at once
  for (; at + (kAhead - 1) * step < end; at += kAhead * step) {
    apply_some<Type, kWidth, kAhead, kHasResidual>(call, at, step, channel_of);
  }
  for (; at < end; at += step) {
    apply_some<Type, kWidth, 1, kHasResidual>(call, at, step, channel_of);
  }
}

// Pieces `at`, `at + step`, ... below `end` of memory. `channel_of` gives what is done to each
// number of a piece: that of one channel, or of as many as a piece has numbers.
template <class Type, int kWidth, class ChannelOf>
__device__ void apply(const BatchNormApplyCall& call, long long at, long long step, long long end,
                      const ChannelOf& channel_of) {
  if (call.residual != nullptr) {
    apply<Type, kWidth, true>(call, at, step, end, channel_of);
  } else {
    apply<Type, kWidth, false>(call, at, step, end, channel_of);
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
  Channel::read<Type>(channels, call.mean, call.spread, call.weight, call.bias, piece * kWidth,
                      call.is_variance, call.eps);
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
    Channel channel[1];
    Channel::read<Type>(channel, call.mean, call.spread, call.weight, call.bias,
                        (unsigned)(plane % call.channels), call.is_variance, call.eps);
    const long long start = plane * plane_pieces;
    apply<Type, kWidth>(call, start + (long long)blockIdx.y * blockDim.x + threadIdx.x,
                        (long long)gridDim.y * blockDim.x, start + plane_pieces,
                        [&](int) { return channel[0]; });
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

#define APPLY(Type, suffix, width)                                                            \
  extern "C" __global__ void __launch_bounds__(512, 2)                                        \
      batch_norm_pixels_##suffix##_##width(const __grid_constant__ BatchNormApplyCall call) { \
    wait_for_inputs();                                                                        \
    let_next_start();                                                                         \
    apply_to_pixels<Type, width>(call);                                                       \
  }                                                                                           \
  extern "C" __global__ void __launch_bounds__(512, 2)                                        \
      batch_norm_planes_##suffix##_##width(const __grid_constant__ BatchNormApplyCall call) { \
    wait_for_inputs();                                                                        \
    let_next_start();                                                                         \
    apply_to_planes<Type, width>(call);                                                       \
  }
#define SUMS(Type, suffix, width)                                                          \
  extern "C" __global__ void __launch_bounds__(512)                                        \
      batch_norm_sums_##suffix##_##width(const __grid_constant__ BatchNormSumsCall call) { \
    add_up_planes<Type, width>(call);                                                      \
  }
#define OF_16_BITS(Type, suffix)                                                 \
  extern "C" __global__ void __launch_bounds__(256)                              \
      batch_norm_copy_##suffix(const __grid_constant__ BatchNormCopyCall call) { \
    copy_vectors<Type>(call);                                                    \
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
