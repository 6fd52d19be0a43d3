// What norm_forward.cu and norm_backward.cu share: where rows lie, what a row is multiplied by and
// shifted by, sums over the threads that share a row, and the names of the kernels.
#pragma once

#include "norm_rows_call.h"
#include "number.cuh"

using Type = KERNEL_TYPE;
using Bits = Type::Bits;

__device__ const Bits* row_of(const NormRows& rows, unsigned row) {
  long long offset = row * rows.stride;
  if (rows.inner != 0) {
    const unsigned outer = row / rows.inner, index = row - outer * rows.inner;
    const unsigned outermost = outer / rows.middle, middle = outer - outermost * rows.middle;
    offset = outermost * rows.stride + middle * rows.middle_stride + index * rows.inner_stride;
  }
  return (const Bits*)rows.data + offset;
}

// The kernels before it in the stream have written what this one reads; only what comes behind this
// overlaps with them.
__device__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may start, up to where it waits in its turn.
__device__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
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
        ((const Piece<Float, kPart>*)data)[(vector * kWidth + k) / kPart].read(part);
#pragma unroll
        for (int i = 0; i < kPart; ++i) values[k + i] = part[i];
      }
    } else {
      ((const Piece<Type, kWidth>*)data)[vector].read(values);
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

// Over the lanes of a warp, or over each `group` of them, a power of two.
__device__ float sum_within_warp(float value, unsigned group) {
  if (group < 32) {
    for (unsigned distance = group / 2; distance > 0; distance /= 2) {
      value += __shfl_xor_sync(~0u, value, distance);
    }
  } else {
#pragma unroll
    for (unsigned distance = 16; distance > 0; distance /= 2) {
      value += __shfl_xor_sync(~0u, value, distance);
    }
  }
  return value;
}

// Over the `group` threads that share a row: as above, or the block's whole warps, every thread of
// which must come here. `scratch` is free again after the next barrier.
template <int kSums>
__device__ void sum_up(float (&sums)[kSums], unsigned group, float (*scratch)[32]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = sum_within_warp(sums[i], group);
  if (group <= 32) return;
  const unsigned lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    if (lane == 0) scratch[i][threadIdx.x / 32] = sums[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    sums[i] = sum_within_warp(lane < group / 32 ? scratch[i][lane] : 0, 32);
  }
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
