// Rotary position embedding, and its gradient: the rotation back. Compiled when the package is
// built (cmake/compile_kernels.py); rotary_cuda.cpp launches it.

#include "rotary.cuh"

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
    turn(first[k], second[k], cos_first[k], cos_second[k], sin_first[k], sin_second[k],
         call.is_backward);
  }
  auto* out = (Vector*)call.out + row * 2 * call.half + piece;
  out[0] = Vector::of(first);
  out[call.half] = Vector::of(second);
}

// A thread's item is two pieces of what turns, half of that apart, so that a warp reads and writes
// memory without gaps. They turn with each other, or if kInside the neighbours in each of them.
// Pieces of one number may be neighbours too. Other items are two pieces of what is copied.
template <class Type, class Angle, bool kInside, int kWidth>
__device__ void rotary_any(const RotaryAnyCall& call) {
  using Vector = Piece<Type, kWidth>;
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= call.items) return;
  const unsigned all_heads = call.query.heads + call.key.heads;
  const long long row = i / call.row_items, pixel = row / all_heads;
  const unsigned item = i - row * call.row_items, any_head = row - pixel * all_heads;
  const unsigned batch = pixel / call.tokens, token = pixel - (long long)batch * call.tokens;
  const bool is_key = any_head >= call.query.heads;
  const RotaryHeads heads = is_key ? call.key : call.query;
  const unsigned head = is_key ? any_head - call.query.heads : any_head;
  const auto* x =
      (const Vector*)((const typename Type::Bits*)heads.input + batch * heads.batch_stride +
                      head * heads.head_stride + token * heads.token_stride);
  auto* out = (Vector*)heads.out + (pixel * heads.heads + head) * call.pieces;
  if (item >= call.half) {
    const unsigned copied = call.pieces - 2 * call.half, one = item + call.half;
    const unsigned other = one + (copied + 1) / 2;
    out[one] = x[one];
    if (other < call.pieces) out[other] = x[other];
    return;
  }
  const bool is_neighbour = kWidth == 1 && call.is_interleaved;
  const unsigned at_first = is_neighbour ? 2 * item : item;
  const unsigned at_second = is_neighbour ? 2 * item + 1 : item + call.half;
  constexpr unsigned kPairs = kInside ? kWidth / 2 : kWidth;  // of a piece
  const FactorRow of_first = factor_row(call, item * kPairs, batch, token);
  const FactorRow of_second =
      kInside ? factor_row(call, (item + call.half) * kPairs, batch, token) : of_first;
  float first[kWidth], second[kWidth], cos_first[kWidth], cos_second[kWidth], sin_first[kWidth],
      sin_second[kWidth];
  read_piece<Type>(x, at_first, first);
  read_piece<Type>(x, at_second, second);
  read_factors<Angle, kInside>(call, call.cos, of_first, of_second, batch, item, cos_first,
                               cos_second);
  read_factors<Angle, kInside>(call, call.sin, of_first, of_second, batch, item, sin_first,
                               sin_second);
  if constexpr (kInside) {
    turn_neighbours(first, cos_first, sin_first, call.is_backward);
    turn_neighbours(second, cos_second, sin_second, call.is_backward);
  } else {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      turn(first[k], second[k], cos_first[k], cos_second[k], sin_first[k], sin_second[k],
           call.is_backward);
    }
  }
  out[at_first] = Vector::of(first);
  out[at_second] = Vector::of(second);
}

#define ROTARY_CALL(name, Call, ...)                                                          \
  extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ Call call) { \
    __VA_ARGS__(call);                                                                        \
  }
#define ROTARY(Type, Angle, name, wide)                                                         \
  ROTARY_CALL(rotary_##name##_##wide, RotaryCall, rotary<Type, Angle, wide>)                    \
  ROTARY_CALL(rotary_##name##_1, RotaryCall, rotary<Type, Angle, 1>)                            \
  ROTARY_CALL(rotary_any_##name##_##wide, RotaryAnyCall, rotary_any<Type, Angle, false, wide>)  \
  ROTARY_CALL(rotary_pairs_##name##_##wide, RotaryAnyCall, rotary_any<Type, Angle, true, wide>) \
  ROTARY_CALL(rotary_any_##name##_1, RotaryAnyCall, rotary_any<Type, Angle, false, 1>)

ROTARY(Half, Half, half, 8)
ROTARY(Half, Float, half_float, 8)
ROTARY(BFloat16, BFloat16, bfloat16, 8)
ROTARY(BFloat16, Float, bfloat16_float, 8)
ROTARY(Float, Float, float, 4)
