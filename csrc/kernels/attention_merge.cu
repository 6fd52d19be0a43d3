// Attention over some keys becomes attention over some more. Compiled when the package is built
// (cmake/compile_kernels.py); attention_merge_cuda.cpp launches it.

#include "attention_merge_call.h"
#include "number.cuh"

template <class Type, class PartType, int kWidth>
__device__ void merge(const AttentionMergeCall& m) {
  using Vector = Piece<Type, kWidth>;
  using PartVector = Piece<PartType, kWidth>;
  const float infinity = __uint_as_float(0x7f800000);
  const int lane = threadIdx.x % kAttentionMergeLanes;
  const unsigned row =
      blockIdx.x * (blockDim.x / kAttentionMergeLanes) + threadIdx.x / kAttentionMergeLanes;
  const bool is_row = row < m.rows;
  // Tokens before heads, as they mostly lie in memory.
  const unsigned head = row % m.heads;
  const unsigned query = row / m.heads % m.queries;
  const unsigned batch = row / m.heads / m.queries;
  float* lse = m.lse + batch * m.lse_batch + head * m.lse_head + query * m.lse_query;
  const float* part_lse =
      m.part_lse + batch * m.part_lse_batch + head * m.part_lse_head + query * m.part_lse_query;
  const float own = is_row ? *lse : 0.f, other = is_row ? *part_lse : 0.f;
  __syncthreads();  // all lanes have read what one of them writes
  if (!is_row) return;

  // Relative to the larger one; where neither sees a key the difference would be NaN. The larger of
  // a number and NaN is the number, and NaN goes into the sum.
  const float highest = fmaxf(own, other);
  const bool is_empty = own == -infinity && other == -infinity;
  float share = is_empty ? 0.f : expf(own - highest);
  float part_share = is_empty ? 0.f : expf(other - highest);
  const float sum = share + part_share;
  if (!is_empty) {
    share /= sum;
    part_share /= sum;
  }
  auto* out = (Vector*)((typename Type::Bits*)m.out + batch * m.out_batch + head * m.out_head +
                        query * m.out_query);
  const auto* part =
      (const PartVector*)((const typename PartType::Bits*)m.part + batch * m.part_batch +
                          head * m.part_head + query * m.part_query);
#pragma unroll 2
  for (int at = lane; at < m.pieces; at += kAttentionMergeLanes) {
    float values[kWidth], more[kWidth];
    out[at].read(values);
    part[at].read(more);
#pragma unroll
    for (int n = 0; n < kWidth; ++n) {
      // What has no share counts for nothing, whatever it holds.
      values[n] =
          (share == 0 ? 0.f : share * values[n]) + (part_share == 0 ? 0.f : part_share * more[n]);
    }
    out[at] = Vector::of(values);
  }
  if (lane == 0) *lse = is_empty ? -infinity : highest + logf(sum);
}

#define ATTENTION_MERGE(name, Type, PartType, width)           \
  extern "C" __global__ void attention_merge_##name##_##width( \
      const __grid_constant__ AttentionMergeCall call) {       \
    merge<Type, PartType, width>(call);                        \
  }

// By the parts' numbers, and the result's where those are wider.
ATTENTION_MERGE(half, Half, Half, 8)
ATTENTION_MERGE(half, Half, Half, 1)
ATTENTION_MERGE(bfloat16, BFloat16, BFloat16, 8)
ATTENTION_MERGE(bfloat16, BFloat16, BFloat16, 1)
ATTENTION_MERGE(half_float, Float, Half, 8)
ATTENTION_MERGE(half_float, Float, Half, 1)
ATTENTION_MERGE(bfloat16_float, Float, BFloat16, 8)
ATTENTION_MERGE(bfloat16_float, Float, BFloat16, 1)
