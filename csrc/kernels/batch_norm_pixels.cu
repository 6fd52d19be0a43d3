// Batch norm in training of images with their channels last: the statistics, and the gradient.
// Compiled when the package is built (cmake/compile_kernels.py); batch_norm_pixels_cuda.cpp
// launches them; the norm itself is batch_norm.cu's. What is added up is read from the last pixel
// to the first, and what is written then from the first to the last: what the one has read last is
// still in the cache when the other begins.

#include "batch_norm.cuh"
#include "batch_norm_pixels_call.h"
#include "column_sums.cuh"
#include "threads.cuh"

constexpr int kThreads = 512;

// How many of its rows of threads have a pixel more.
__device__ unsigned longer_rows(const BatchNormPixels& pixels, unsigned stretch,
                                unsigned rows_at_once) {
  return stretch < pixels.longer ? rows_at_once : stretch == pixels.longer ? pixels.rest : 0;
}

// How many pixels a stretch has.
__device__ float rows_of(const BatchNormPixels& pixels, unsigned stretch, unsigned rows_at_once) {
  return pixels.turns * (float)rows_at_once + (float)longer_rows(pixels, stretch, rows_at_once);
}

// What a thread has of the pixels.
struct Place {
  unsigned pieces, piece;  // of a pixel; the thread's
  unsigned rows_at_once;   // of the block
  long long first, step;   // in pixels

  template <int kWidth>
  static __device__ Place of(const BatchNormPixels& pixels) {
    const unsigned rows_at_once = blockDim.x / pixels.pieces;
    return {pixels.channels / kWidth, blockIdx.x * pixels.pieces + threadIdx.x % pixels.pieces,
            rows_at_once, (long long)blockIdx.y * rows_at_once + threadIdx.x / pixels.pieces,
            (long long)pixels.stretches * rows_at_once};
  }
};

// Gives the thread's pixels to `taker`, kAhead of them at a time while there are so many, by where
// the piece of the first is and how far the next is from it: from the last pixel to the first, or
// the other way.
template <int kAhead, bool kFromLast, class Taker>
__device__ void for_pixels(const BatchNormPixels& pixels, const Place& place, Taker& taker) {
  if (place.piece >= place.pieces) return;
  long long left = pixels.rows - place.first;
  long long at = (kFromLast ? left - 1 : place.first) * place.pieces + place.piece;
  const long long step = (kFromLast ? -place.step : place.step) * place.pieces;
  for (; left > (kAhead - 1) * place.step; left -= kAhead * place.step, at += kAhead * step) {
    taker.template take<kAhead>(at, step);
  }
  for (; left > 0; left -= place.step, at += step) taker.template take<1>(at, step);
}

template <class Vector, int kCount>
__device__ void load(Vector (&pieces)[kCount], const void* memory, long long at, long long step) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) pieces[i] = ((const Vector*)memory)[at + i * step];
}

// Two numbers of a channel from each row of threads.
struct Rows {
  const float *first, *second;
  unsigned columns;

  __device__ void read(unsigned row, float& one, float& other) const {
    one = first[row * columns];
    other = second[row * columns];
  }
};

// Calls `join` with each channel that a block has and what its threads have of it.
template <int kWidth, class Join>
__device__ void join_rows(const BatchNormPixels& pixels, const float (&first)[kWidth],
                          const float (&second)[kWidth], const Join& join) {
  __shared__ float of_first[kThreads * kWidth], of_second[kThreads * kWidth];
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    of_first[threadIdx.x * kWidth + k] = first[k];
    of_second[threadIdx.x * kWidth + k] = second[k];
  }
  __syncthreads();
  const unsigned columns = pixels.pieces * kWidth;
  for (unsigned column = threadIdx.x; column < columns; column += blockDim.x) {
    const unsigned channel = blockIdx.x * columns + column;
    if (channel < pixels.channels) {
      join(channel, Rows{of_first + column, of_second + column, columns});
    }
  }
}

// Joins means of parts, and squares of what is left without them. Near one of the means: the
// squares of the others then lose no digits that parts' own squares have.
struct Moments {
  float near, sum = 0, square = 0;

  __device__ explicit Moments(float near) : near(near) {
  }
  __device__ void add(float count, float mean, float squares) {
    const float off = mean - near;
    sum = fmaf(count, off, sum);
    square += fmaf(count * off, off, squares);
  }
  __device__ float mean(float count) const {
    return near + sum / count;
  }
  __device__ float squares(float count) const {
    return relu(fmaf(-sum / count, sum, square));
  }
};

// A thread adds up what its numbers are without the first of them: a mean far from 0 would take the
// digits of their squares.
template <class Type, int kWidth>
struct Spread {
  using Vector = Piece<Type, kWidth>;

  const void* input;
  float shift[kWidth] = {}, sums[kWidth] = {}, squares[kWidth] = {};
  bool has_shift = false;

  template <int kCount>
  __device__ void take(long long at, long long step) {
    Vector pieces[kCount];
    load(pieces, input, at, step);
    if (!has_shift) pieces[0].read(shift), has_shift = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float values[kWidth];
      pieces[i].read(values);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float value = values[k] - shift[k];
        sums[k] += value;
        squares[k] = fmaf(value, value, squares[k]);
      }
    }
  }
};

// Means, and the squares of what numbers are without them.
template <class Type, int kWidth>
__device__ void find_stats(const BatchNormStatsCall& call) {
  const Place place = Place::of<kWidth>(call.pixels);
  Spread<Type, kWidth> spread{call.input};
  for_pixels<4, true>(call.pixels, place, spread);
  auto& [input, means, sums, squares, has_shift] = spread;
  // The first rows of threads have had one pixel more.
  const unsigned longer = longer_rows(call.pixels, blockIdx.y, place.rows_at_once);
  const unsigned row_of_threads = threadIdx.x / call.pixels.pieces;
  const float rows = call.pixels.turns + (row_of_threads < longer ? 1 : 0);
  const float part = rows > 0 ? 1 / rows : 0;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    squares[k] = relu(fmaf(-sums[k] * part, sums[k], squares[k]));
    means[k] = fmaf(sums[k], part, means[k]);
  }
  const unsigned channels = call.pixels.channels;
  join_rows(call.pixels, means, squares, [&](unsigned channel, const Rows& of_threads) {
    Moments joined(of_threads.first[0]);
    for (unsigned row = 0; row < place.rows_at_once; ++row) {
      float mean, left;
      of_threads.read(row, mean, left);
      joined.add(call.pixels.turns + (row < longer ? 1 : 0), mean, left);
    }
    const float count = rows_of(call.pixels, blockIdx.y, place.rows_at_once);
    call.partial[2LL * blockIdx.y * channels + channel] = joined.mean(count);
    call.partial[(2LL * blockIdx.y + 1) * channels + channel] = joined.squares(count);
  });
}

template <class Type>
__device__ void write_vector(const BatchNormOutVector& vector, unsigned channel, float value) {
  if (vector.data == nullptr) return;
  if (vector.is_float) {
    ((float*)vector.data)[channel] = value;
  } else {
    ((typename Type::Bits*)vector.data)[channel] = Type::write(value);
  }
}

template <class Type>
__device__ float old_of(const BatchNormOutVector& vector, unsigned channel) {
  return read_vector<Type>({vector.data, vector.is_float}, channel, 0);
}

// A sum over the warps of a block for each lane, which every thread gets.
__device__ float sum_of_warps(float value, float (*by_warp)[32]) {
  const unsigned lane = threadIdx.x % 32;
  by_warp[threadIdx.x / 32][lane] = value;
  __syncthreads();
  value = 0;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) value += by_warp[warp][lane];
  return value;
}

// A block has 32 channels; of the stretches each warp has some.
template <class Type>
__device__ void finish_stats(const BatchNormStatsCall& call) {
  __shared__ float by_warp[2][32][32];
  const BatchNormPixels& pixels = call.pixels;
  const unsigned channel = blockIdx.x * 32 + threadIdx.x % 32;
  const unsigned first = threadIdx.x / 32, warps = blockDim.x / 32;
  const unsigned rows_at_once = kThreads / pixels.pieces;
  const float* means = call.partial + min(channel, pixels.channels - 1);
  constexpr unsigned kAhead = 5;  // that memory is asked for at once
  Moments joined(means[0]);
  for (unsigned i = first; i < pixels.stretches; i += kAhead * warps) {
    float mean[kAhead], left[kAhead];
#pragma unroll
    for (unsigned k = 0; k < kAhead; ++k) {
      const unsigned stretch = i + k * warps;
      const float* there =
          means + 2LL * (stretch < pixels.stretches ? stretch : i) * pixels.channels;
      mean[k] = there[0];
      left[k] = there[pixels.channels];
    }
#pragma unroll
    for (unsigned k = 0; k < kAhead; ++k) {
      const unsigned stretch = i + k * warps;
      const float count = rows_of(pixels, stretch, rows_at_once);
      if (stretch < pixels.stretches) joined.add(count, mean[k], left[k]);
    }
  }
  joined.sum = sum_of_warps(joined.sum, by_warp[0]);
  joined.square = sum_of_warps(joined.square, by_warp[1]);
  if (first > 0 || channel >= pixels.channels) return;
  const float rows = (float)pixels.rows;
  // Both are read before anything is written.
  const float old_mean = old_of<Type>(call.running_mean, channel);
  const float old_var = old_of<Type>(call.running_var, channel);
  const float mean = joined.mean(rows), squares = joined.squares(rows);
  const auto moved = [&](float old, float value) { return fmaf(call.momentum, value - old, old); };
  call.mean[channel] = mean;
  call.rstd[channel] = rsqrtf(squares / rows + call.eps);
  write_vector<Type>(call.running_mean, channel, moved(old_mean, mean));
  write_vector<Type>(call.running_var, channel, moved(old_var, squares / (rows - 1)));
}

// How the backward knows what the ReLU let pass.
enum class Relu { kNone, kOfInput, kOfOut };

// What comes to the norm of the gradient of its result, which may be a sum of two, and what the
// norm made of the input.
template <class Type, int kWidth, Relu kRelu, bool kIsOfTwo = false>
struct Slope {
  using Vector = Piece<Type, kWidth>;
  // Memory is asked for as much at once, however many images are read.
  static constexpr int kAhead = kRelu == Relu::kOfOut ? 2 : 4;

  const BatchNormGradientCall& call;
  Channel channels[kWidth];

  __device__ Slope(const BatchNormGradientCall& call, unsigned piece) : call(call) {
    Channel::read<Type>(channels, {call.mean, true}, {call.rstd, true}, call.weight, call.bias,
                        piece * kWidth);
  }
  // Calls `use` with where a piece is, its gradients and its inputs.
  template <int kCount, class Use>
  __device__ void read(long long at, long long step, const Use& use) const {
    Vector grad[kCount], more[kCount], input[kCount], out[kCount];
    load(grad, call.grad, at, step);
    if (kIsOfTwo) load(more, call.more, at, step);
    load(input, call.input, at, step);
    if (kRelu == Relu::kOfOut) load(out, call.out, at, step);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float grads[kWidth], inputs[kWidth], outs[kWidth];
      grad[i].read(grads);
      if (kIsOfTwo) more[i].add_to(grads);
      input[i].read(inputs);
      if (kRelu == Relu::kOfOut) out[i].read(outs);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (kRelu == Relu::kOfInput) outs[k] = channels[k].norm(inputs[k]);
        if (kRelu != Relu::kNone && !(outs[k] > 0)) grads[k] = 0;
      }
      use(at + i * step, grads, inputs);
    }
  }
};

template <class Type, int kWidth, Relu kRelu, bool kIsOfTwo>
struct Sums : Slope<Type, kWidth, kRelu, kIsOfTwo> {
  using Slope<Type, kWidth, kRelu, kIsOfTwo>::Slope;
  float sums[kWidth] = {}, products[kWidth] = {};

  template <int kCount>
  __device__ void take(long long at, long long step) {
    this->template read<kCount>(
        at, step, [&](long long here, const float (&grads)[kWidth], const float (&inputs)[kWidth]) {
          if (kRelu == Relu::kOfOut && this->call.masked != nullptr) {
            ((Piece<Type, kWidth>*)this->call.masked)[here] = Piece<Type, kWidth>::of(grads);
          }
#pragma unroll
          for (int k = 0; k < kWidth; ++k) {
            sums[k] += grads[k];
            products[k] = fmaf(grads[k], inputs[k] - this->channels[k].mean, products[k]);
          }
        });
  }
};

template <class Type, int kWidth, Relu kRelu, bool kIsOfTwo = false>
__device__ void find_sums(const BatchNormGradientCall& call) {
  const Place place = Place::of<kWidth>(call.pixels);
  Sums<Type, kWidth, kRelu, kIsOfTwo> found(call, min(place.piece, place.pieces - 1));
  for_pixels<found.kAhead, true>(call.pixels, place, found);
  const unsigned channels = call.pixels.channels;
  join_rows(call.pixels, found.sums, found.products, [&](unsigned channel, const Rows& of_threads) {
    float sum = 0, products = 0;
    for (unsigned row = 0; row < place.rows_at_once; ++row) {
      float one, other;
      of_threads.read(row, one, other);
      sum += one;
      products += other;
    }
    call.partial[2LL * blockIdx.y * channels + channel] = sum;
    call.partial[(2LL * blockIdx.y + 1) * channels + channel] = products;
  });
}

template <class Type>
__device__ void finish_sums(const BatchNormGradientCall& call) {
  const unsigned channels = call.pixels.channels;
  add_up_columns(call.partial, call.pixels.stretches, 2 * channels,
                 [&](unsigned column, float sum) {
                   call.sums[column] = sum;
                   if (column < channels) {
                     write_vector<Type>(call.grad_bias, column, sum);
                   } else {
                     const unsigned channel = column - channels;
                     write_vector<Type>(call.grad_weight, channel, sum * call.rstd[channel]);
                   }
                 });
}

// Through the statistics, of what has been added up.
template <class Type, int kWidth, Relu kRelu>
struct Gradient : Slope<Type, kWidth, kRelu> {
  float of_all[kWidth], of_norm[kWidth];

  __device__ Gradient(const BatchNormGradientCall& call, unsigned piece)
      : Slope<Type, kWidth, kRelu>(call, piece) {
    const float part = 1 / (float)call.pixels.rows;
    const unsigned first = piece * kWidth;
    float rstd[kWidth];
    read_vector<Float>({call.rstd, true}, first, 1, rstd);
    read_vector<Float>({call.sums, true}, first, 0, of_all);
    read_vector<Float>({call.sums + call.pixels.channels, true}, first, 0, of_norm);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      of_all[k] *= part;
      of_norm[k] *= part * rstd[k] * rstd[k];
    }
  }
  template <int kCount>
  __device__ void take(long long at, long long step) {
    this->template read<kCount>(
        at, step, [&](long long here, const float (&grads)[kWidth], const float (&inputs)[kWidth]) {
          float found[kWidth];
#pragma unroll
          for (int k = 0; k < kWidth; ++k) {
            const Channel& channel = this->channels[k];
            found[k] = fmaf(channel.mean - inputs[k], of_norm[k], grads[k] - of_all[k]);
            found[k] *= channel.factor;
          }
          ((Piece<Type, kWidth>*)this->call.grad_input)[here] = Piece<Type, kWidth>::of(found);
        });
  }
};

template <class Type, int kWidth, Relu kRelu>
__device__ void find_gradient(const BatchNormGradientCall& call) {
  const Place place = Place::of<kWidth>(call.pixels);
  if (place.piece >= place.pieces) return;
  Gradient<Type, kWidth, kRelu> gradient(call, place.piece);
  for_pixels<gradient.kAhead, false>(call.pixels, place, gradient);
}

#define KERNEL(name, Call, function, threads, ...)           \
  extern "C" __global__ void __launch_bounds__(threads)      \
      batch_norm_##name(const __grid_constant__ Call call) { \
    wait_for_inputs();                                       \
    let_next_start();                                        \
    function<__VA_ARGS__>(call);                             \
  }
#define GRADIENT(type, relu, Type, width, kRelu)                                          \
  KERNEL(sums_##relu##_##type, BatchNormGradientCall, find_sums, 512, Type, width, kRelu) \
  KERNEL(gradient_##relu##_##type, BatchNormGradientCall, find_gradient, 512, Type, width, kRelu)
#define KERNELS(type, Type, width)                                           \
  KERNEL(stats_##type, BatchNormStatsCall, find_stats, 512, Type, width)     \
  KERNEL(finish_stats_##type, BatchNormStatsCall, finish_stats, 1024, Type)  \
  KERNEL(finish_sums_##type, BatchNormGradientCall, finish_sums, 1024, Type) \
  GRADIENT(type, none, Type, width, Relu::kNone)                             \
  GRADIENT(type, of_input, Type, width, Relu::kOfInput)                      \
  GRADIENT(type, of_out, Type, width, Relu::kOfOut)                          \
  KERNEL(sums_of_two_##type, BatchNormGradientCall, find_sums, 512, Type, width, Relu::kOfOut, true)

KERNELS(half, Half, 8)
KERNELS(bfloat16, BFloat16, 8)
KERNELS(float, Float, 4)
