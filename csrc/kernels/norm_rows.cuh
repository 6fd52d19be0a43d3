// What norm_forward.cu and norm_backward.cu share: where rows lie, what a row is multiplied by and
// shifted by, and the names of the kernels.
#pragma once

#include "norm_rows_call.h"
#include "number.cuh"
#include "threads.cuh"

using Type = KERNEL_TYPE;
using Bits = Type::Bits;

// Of the first number, in numbers.
__device__ long long offset_of(const NormRows& rows, unsigned row) {
  long long offset = row * rows.stride;
  if (rows.inner != 0) {
    const unsigned outer = row / rows.inner, index = row - outer * rows.inner;
    const unsigned outermost = outer / rows.middle, middle = outer - outermost * rows.middle;
    offset = outermost * rows.stride + middle * rows.middle_stride + index * rows.inner_stride;
  }
  return offset;
}

__device__ const Bits* row_of(const NormRows& rows, unsigned row) {
  return (const Bits*)rows.data + offset_of(rows, row);
}

// A weight or bias, of the rows' type or float32.
struct Parameter {
  const void* data;
  bool is_float;
  float otherwise, shift;  // the value where there is none; what is added where there is one

  template <int kWidth>
  __device__ void read(unsigned vector, float (&values)[kWidth]) const {
    if (data == nullptr) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) values[k] = otherwise;
      return;
    }
    if (is_float) {
      constexpr int kPart = kWidth < 4 ? kWidth : 4;
#pragma unroll
      for (int k = 0; k < kWidth; k += kPart) {
        float part[kPart];
        // One load, not one for each number.
        const auto piece = ((const Piece<Float, kPart>*)data)[(vector * kWidth + k) / kPart];
        piece.read(part);
#pragma unroll
        for (int i = 0; i < kPart; ++i) values[k + i] = part[i];
      }
    } else {
      const auto piece = ((const Piece<Type, kWidth>*)data)[vector];
      piece.read(values);
    }
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] += shift;
  }
};

__device__ Parameter factor_of(const NormCall& call) {
  return {call.weight, call.is_weight_float, 1, call.zero_centered ? 1.0f : 0.0f};
}

__device__ Parameter bias_of(const NormCall& call) {
  return {call.bias, call.is_bias_float, 0, 0};
}

// A row in pieces, of which a block's threads have any number each.
template <int kBytes>
struct AnyRow {
  static constexpr int kWidth = kBytes / sizeof(Bits);
  using Vector = Piece<Type, kWidth>;

  // Calls `visit` with the numbers of each of the thread's pieces, and where they are.
  template <class Visit>
  static __device__ void each(const Vector* row, unsigned vectors, const Visit& visit) {
#pragma unroll 4
    for (unsigned at = threadIdx.x; at < vectors; at += blockDim.x) {
      float values[kWidth];
      row[at].read(values);
      visit(values, at);
    }
  }
};

// The kernels' names: by the bytes of a piece, or n for those of one number, and the number of
// pieces a thread.
constexpr int n = sizeof(Bits);

#define NORM(direction, bytes, vectors, threads, blocks)                                    \
  extern "C" __global__ void __launch_bounds__(threads, blocks)                             \
      rms_norm_##direction##_##bytes##_##vectors(const __grid_constant__ NormCall call) {   \
    direction<bytes, vectors, false>(call);                                                 \
  }                                                                                         \
  extern "C" __global__ void __launch_bounds__(threads, blocks)                             \
      layer_norm_##direction##_##bytes##_##vectors(const __grid_constant__ NormCall call) { \
    direction<bytes, vectors, true>(call);                                                  \
  }

#define NORM_ANY(name, threads, ...)                       \
  extern "C" __global__ void __launch_bounds__(threads)    \
      norm_##name(const __grid_constant__ NormCall call) { \
    __VA_ARGS__(call);                                     \
  }
