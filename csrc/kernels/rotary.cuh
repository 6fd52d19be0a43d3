// What kernels that turn pairs share: where the cosines and sines of a pair are, and the rotation.
#pragma once

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
