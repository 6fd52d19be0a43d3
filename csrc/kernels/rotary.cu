// Rotary position embedding, and its gradient: the rotation back. Compiled when the package is
// built (cmake/compile_kernels.py); rotary_cuda.cpp launches it.

#include "number.cuh"
#include "rotary_call.h"

// Turns a pair. Forward each number takes its own sine, backward the one that it was given with.
__device__ inline void turn(float& first, float& second, float cos_first, float cos_second,
                            float sin_first, float sin_second, bool is_backward) {
  const float one = first, other = second;
  const float to_first = is_backward ? other * sin_second : -other * sin_first;
  const float to_second = is_backward ? -one * sin_first : one * sin_second;
  first = one * cos_first + to_first;
  second = other * cos_second + to_second;
}

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

// Where the factors of a pair are: of the section that it belongs to.
struct FactorRow {
  unsigned axis;
  long long row;
};

__device__ inline FactorRow factor_row(const RotaryAnyCall& call, unsigned pair, unsigned batch,
                                       unsigned token) {
  unsigned axis = 0;
#pragma unroll
  for (const unsigned end : call.ends) axis += pair >= end;
  if (call.positions == nullptr) return {axis, token};
  const long long at = axis * call.position_axis_stride + batch * call.position_batch_stride +
                       token * call.position_token_stride;
  const long long position = call.has_long_positions ? ((const long long*)call.positions)[at]
                                                     : ((const int*)call.positions)[at];
  return {axis, min(max(position, 0ll), call.table_rows - 1)};
}

template <class Type, int kWidth>
__device__ void read_piece(const void* row, unsigned piece, float (&values)[kWidth]) {
  const Piece<Type, kWidth> all = ((const Piece<Type, kWidth>*)row)[piece];  // at once
  all.read(values);
}

// The factors of each number of a thread's two pieces.
template <class Angle, bool kInside, int kWidth>
__device__ void read_factors(const RotaryAnyCall& call, const RotaryFactors& factors,
                             FactorRow of_first, FactorRow of_second, unsigned batch, unsigned item,
                             float (&first)[kWidth], float (&second)[kWidth]) {
  const auto row_at = [&](FactorRow row) {
    return (const typename Angle::Bits*)factors.data + row.axis * factors.axis_stride +
           batch * factors.batch_stride + row.row * factors.row_stride;
  };
  if (!call.has_factor_of_pair) {
    const bool is_neighbour = kWidth == 1 && call.is_interleaved;
    read_piece<Angle>(row_at(of_first), is_neighbour ? 2 * item : item, first);
    read_piece<Angle>(row_at(of_second), is_neighbour ? 2 * item + 1 : item + call.half, second);
    return;
  }
  if constexpr (kInside) {
    float pairs_of_first[kWidth / 2], pairs_of_second[kWidth / 2];
    read_piece<Angle>(row_at(of_first), item, pairs_of_first);
    read_piece<Angle>(row_at(of_second), item + call.half, pairs_of_second);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      first[k] = pairs_of_first[k / 2];
      second[k] = pairs_of_second[k / 2];
    }
  } else {
    read_piece<Angle>(row_at(of_first), item, first);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) second[k] = first[k];
  }
}

template <int kWidth>
__device__ void turn_neighbours(float (&values)[kWidth], const float (&cos)[kWidth],
                                const float (&sin)[kWidth], bool is_backward) {
#pragma unroll
  for (int k = 0; k < kWidth; k += 2) {
    turn(values[k], values[k + 1], cos[k], cos[k + 1], sin[k], sin[k + 1], is_backward);
  }
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
