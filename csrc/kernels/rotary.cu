// Rotary position embedding, and its gradient: the rotation back. Compiled when the package is
// built (cmake/compile_kernels.py); rotary_cuda.cpp launches it.

#include "number.cuh"
#include "rotary_call.h"

// A piece of the first half of a head and the one of the second half that it turns with, a thread.
template <class Type, class Angle, int kWidth>
__device__ void rotary(const RotaryCall& call) {
  using Vector = Piece<Type, kWidth>;
  using Factors = Piece<Angle, kWidth>;
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= call.pieces) return;
  const long long row = i / call.half, pixel = row / call.heads;
  const unsigned piece = i - row * call.half, head = row - pixel * call.heads;
  const unsigned batch = pixel / call.tokens, token = pixel - (long long)batch * call.tokens;
  const auto* x =
      (const Vector*)((const typename Type::Bits*)call.input + batch * call.batch_stride +
                      head * call.head_stride + token * call.token_stride) +
      piece;
  const auto factors = [&](const void* data, long long batch_stride, long long token_stride) {
    return (const Factors*)((const typename Angle::Bits*)data + batch * batch_stride +
                            token * token_stride) +
           piece;
  };
  const auto* cos = factors(call.cos, call.cos_batch_stride, call.cos_token_stride);
  const auto* sin = factors(call.sin, call.sin_batch_stride, call.sin_token_stride);
  float first[kWidth], second[kWidth], cos_first[kWidth], cos_second[kWidth], sin_first[kWidth],
      sin_second[kWidth];
  x[0].read(first);
  x[call.half].read(second);
  cos[0].read(cos_first);
  cos[call.half].read(cos_second);
  sin[0].read(sin_first);
  sin[call.half].read(sin_second);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    const float one = first[k], other = second[k];
    // Forward each half takes its own sine, backward the one that it was given with.
    const float to_first = call.is_backward ? other * sin_second[k] : -other * sin_first[k];
    const float to_second = call.is_backward ? -one * sin_first[k] : one * sin_second[k];
    first[k] = one * cos_first[k] + to_first;
    second[k] = other * cos_second[k] + to_second;
  }
  auto* out = (Vector*)call.out + row * 2 * call.half + piece;
  out[0] = Vector::of(first);
  out[call.half] = Vector::of(second);
}

#define ROTARY(Type, Angle, name, width)                                 \
  extern "C" __global__ void __launch_bounds__(256)                      \
      rotary_##name##_##width(const __grid_constant__ RotaryCall call) { \
    rotary<Type, Angle, width>(call);                                    \
  }

ROTARY(Half, Half, half, 8)
ROTARY(Half, Half, half, 1)
ROTARY(Half, Float, half_float, 8)
ROTARY(Half, Float, half_float, 1)
ROTARY(BFloat16, BFloat16, bfloat16, 8)
ROTARY(BFloat16, BFloat16, bfloat16, 1)
ROTARY(BFloat16, Float, bfloat16_float, 8)
ROTARY(BFloat16, Float, bfloat16_float, 1)
ROTARY(Float, Float, float, 4)
ROTARY(Float, Float, float, 1)
