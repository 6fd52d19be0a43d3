// Rows, normed or gated, rounded to numbers of 8 bits. Compiled when the package is built
// (cmake/compile_kernels.py), once for each type of the rows; rows_fp8_cuda.cpp launches it.
//
// A block has a row: in its threads' registers, so that the scale of a row takes no second pass
// over memory, or, where it is longer than those, in passes.

#include "activation.cuh"
#include "fp8.cuh"
#include "norm_rows.cuh"
#include "rows_fp8_call.h"

namespace {

constexpr unsigned kMostWarps = 32;

// Over the block, every thread of which must come here; `scratch` is free after the next barrier.
__device__ unsigned largest_of_block(unsigned most, unsigned* scratch) {
#pragma unroll
  for (unsigned distance = 16; distance > 0; distance /= 2) {
    const unsigned other = __shfl_xor_sync(~0u, most, distance);
    most = other > most ? other : most;
  }
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = most;
  __syncthreads();
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) {
    most = scratch[warp] > most ? scratch[warp] : most;
  }
  return most;
}

template <class Activation, int kWidth>
__device__ void gate(float (&values)[kWidth], const float (&factors)[kWidth]) {
#pragma unroll
  for (int k = 0; k < kWidth; ++k) values[k] = Activation::of(values[k]).x * factors[k];
}

// Calls `visit` with the index of each of the thread's pieces, and where it is.
template <int kVectors, class Visit>
__device__ void each(unsigned vectors, const Visit& visit) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const unsigned at = threadIdx.x + v * blockDim.x;
    if (at < vectors) visit(v, at);
  }
}

template <int kBytes>
struct Fp8Rows {
  static constexpr int kWidth = kBytes / sizeof(Bits);
  static constexpr int kDigits = 4;  // of a result
  using Vector = Piece<Type, kWidth>;
  using Values = float[kWidth];

  const RowsFp8Call& call;
  const Vector *input, *other;
  Parameter weight;
  unsigned vectors;
  float rstd = 1;

  __device__ explicit Fp8Rows(const RowsFp8Call& call)
      : call(call),
        input((const Vector*)row_of(call.input, blockIdx.x)),
        other(call.other.data == nullptr ? nullptr : (const Vector*)row_of(call.other, blockIdx.x)),
        weight{call.weight, call.is_weight_float, 1, call.zero_centered ? 1.0f : 0.0f},
        vectors(call.columns / kWidth) {
  }

  // What a norm is of, or what is rounded: of two pieces where there is another.
  __device__ void combine(unsigned at, const Vector& own, const Vector& its, Values& values) const {
    own.read(values);
    if (other == nullptr) return;
    Values factors;
    its.read(factors);
    switch (call.kind) {
      case RowsFp8Kind::kSilu: return gate<SiluOf<kDigits>>(values, factors);
      case RowsFp8Kind::kGelu: return gate<Gelu>(values, factors);
      case RowsFp8Kind::kGeluTanh: return gate<GeluTanhOf<kDigits>>(values, factors);
      default:
#pragma unroll
        for (int k = 0; k < kWidth; ++k) values[k] += factors[k];
        const Vector sum = Vector::of(values);  // the norm is of what is written
        sum.read(values);
        ((Vector*)call.sum)[(long long)blockIdx.x * vectors + at] = sum;
    }
  }

  __device__ void load(unsigned at, Values& values) const {
    const Vector own = load_whole(input + at);
    combine(at, own, other == nullptr ? own : load_whole(other + at), values);
  }

  // All of the thread's pieces: they are sent for before the first is waited for.
  template <int kVectors>
  __device__ void load_all(Values (&values)[kVectors]) const {
    Vector own[kVectors], its[kVectors];
    each<kVectors>(vectors, [&](int v, unsigned at) { own[v] = load_whole(input + at); });
    if (other != nullptr) {
      each<kVectors>(vectors, [&](int v, unsigned at) { its[v] = load_whole(other + at); });
    }
    each<kVectors>(vectors, [&](int v, unsigned at) { combine(at, own[v], its[v], values[v]); });
  }

  __device__ void norm(unsigned at, Values& values) const {
    if (call.kind != RowsFp8Kind::kNorm) return;
    Values factors;
    weight.read(at, factors);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] *= rstd * factors[k];
  }

  __device__ void write(unsigned at, Values& values, float scale) const {
    const long long place = (long long)blockIdx.x * vectors + at;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] *= scale;
    if (call.is_e5m2) {
      ((Fp8Piece<E5M2, kWidth>*)call.out)[place] = Fp8Piece<E5M2, kWidth>::of(values);
    } else {
      ((Fp8Piece<E4M3, kWidth>*)call.out)[place] = Fp8Piece<E4M3, kWidth>::of(values);
    }
  }

  __device__ static float squares(const Values& values) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sum += values[k] * values[k];
    return sum;
  }

  __device__ float rstd_of(float sum, float (*scratch)[32]) const {
    float sums[1] = {sum};
    sum_up(sums, blockDim.x, scratch);
    return rsqrtf(sums[0] / call.columns + call.eps);
  }

  // The scale of the row, whose largest magnitude the threads have parts of.
  __device__ float scale_by(unsigned most, unsigned* scratch) const {
    most = largest_of_block(most, scratch);
    if (call.scale != nullptr) {
      if (threadIdx.x == 0) {
        if (most > *call.amax) atomicMax(call.amax, most);
        if (blockIdx.x == 0) *call.descale = 1 / *call.scale;
      }
      return *call.scale;
    }
    const float scale = scale_of(most, call.is_e5m2 ? E5M2::kMost : E4M3::kMost);
    if (threadIdx.x == 0) {
      call.amax[blockIdx.x] = most;
      call.descale[blockIdx.x] = 1 / scale;
    }
    return scale;
  }
};

// Calls `visit` with the numbers of each of the thread's pieces, or room for them, and where it is.
template <int kVectors, class Values, class Visit>
__device__ void visit_row(Values* kept, unsigned vectors, const Visit& visit) {
  if constexpr (kVectors > 0) {
    each<kVectors>(vectors, [&](int v, unsigned at) { visit(kept[v], at); });
  } else {
    for (unsigned at = threadIdx.x; at < vectors; at += blockDim.x) visit(kept[0], at);
  }
}

// kVectors pieces a thread; 0: as many as it takes, read in each pass.
template <int kBytes, int kVectors>
__device__ void rows_fp8(const RowsFp8Call& call) {
  using Rows = Fp8Rows<kBytes>;
  constexpr bool kIsKept = kVectors > 0;
  __shared__ float sums[1][32];
  __shared__ unsigned scratch[kMostWarps];
  Rows rows(call);
  using Values = typename Rows::Values;
  Values kept[kIsKept ? kVectors : 1];
  const bool is_norm = call.kind == RowsFp8Kind::kNorm;
  if constexpr (kIsKept) rows.load_all(kept);
  if (is_norm) {
    float sum = 0;
    visit_row<kVectors>(kept, rows.vectors, [&](Values& values, unsigned at) {
      if constexpr (!kIsKept) rows.load(at, values);
      sum += Rows::squares(values);
    });
    rows.rstd = rows.rstd_of(sum, sums);
  }
  unsigned most = 0;
  visit_row<kVectors>(kept, rows.vectors, [&](Values& values, unsigned at) {
    if constexpr (!kIsKept) rows.load(at, values);
    rows.norm(at, values);
    most = largest(most, values);
  });
  const float scale = rows.scale_by(most, scratch);
  visit_row<kVectors>(kept, rows.vectors, [&](Values& values, unsigned at) {
    if constexpr (!kIsKept) {
      rows.load(at, values);
      rows.norm(at, values);
    }
    rows.write(at, values, scale);
  });
}

}  // namespace

#define ROWS_FP8(name, bytes, vectors)                            \
  extern "C" __global__ void __launch_bounds__(512)               \
      rows_fp8_##name(const __grid_constant__ RowsFp8Call call) { \
    rows_fp8<bytes, vectors>(call);                               \
  }

ROWS_FP8(16_4, 16, 4)
ROWS_FP8(16_any, 16, 0)
ROWS_FP8(n_4, n, 4)
ROWS_FP8(n_any, n, 0)
