// The gradients of adaptive norms of rows that shared memory has no room for, by blocks that read
// them twice, and for the sums once more.
#pragma once

#include "adaptive_norm.cuh"

// The input's gradient of a row a block, and what the sums need of the row.
template <int kBytes>
__device__ void backward_rows(const AdaptiveNormCall& call) {
  using Row = AnyRow<kBytes>;
  using Vector = typename Row::Vector;
  constexpr int kWidth = Row::kWidth;
  __shared__ float scratch[2][32];
  const unsigned row = blockIdx.x, sample = row / call.tokens, vectors = call.columns / kWidth;
  wait_for_inputs();
  const auto* input = (const Vector*)row_of(call.input, row);
  const auto* grad_out = (const Vector*)row_of(call.grad_out, row);
  const auto* more =
      call.grad_sum.data == nullptr ? nullptr : (const Vector*)row_of(call.grad_sum, row);
  const float rstd = call.rstd[row], mean = call.is_layer ? call.mean[row] : 0;
  float of_row[2] = {};
  Row::each(input, vectors, [&](const float (&x)[kWidth], unsigned at) {
    float slopes[kWidth], factors[kWidth];
    grad_out[at].read(slopes);
    read_factors(call, sample, at, factors);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const float slope = slopes[k] * factors[k];
      of_row[0] += slope * (x[k] - mean) * rstd;
      of_row[1] += slope;
    }
  });
  sum_up(of_row, blockDim.x, scratch);
  const float along = of_row[0] / call.columns;
  const float shift = call.is_layer ? of_row[1] / call.columns : 0;
  if (call.slopes != nullptr && threadIdx.x == 0) {
    call.slopes[2 * (long long)row] = along;
    call.slopes[2 * (long long)row + 1] = shift;
  }
  if (call.out == nullptr && call.grad_update == nullptr) return;
  const Parameter gate = gate_of(call, sample);
  const long long dense = (long long)row * vectors;
  Row::each(input, vectors, [&](const float (&x)[kWidth], unsigned at) {
    float slopes[kWidth], factors[kWidth], gates[kWidth], result[kWidth] = {};
    grad_out[at].read(slopes);
    read_factors(call, sample, at, factors);
    if (more != nullptr) more[at].read(result);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      result[k] += (slopes[k] * factors[k] - (x[k] - mean) * rstd * along - shift) * rstd;
    }
    if (call.out != nullptr) ((Vector*)call.out)[dense + at] = Vector::of(result);
    if (call.grad_update == nullptr) return;
    gate.read(at, gates);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) result[k] *= gates[k];
    ((Vector*)call.grad_update)[dense + at] = Vector::of(result);
  });
}

constexpr int kWarps = 16;  // of a block that sums up

// Sums over the rows of one worker and sample, in a strip of columns: of a piece a lane, and every
// kWarps-th row a warp.
template <int kSums, int kWidth>
__device__ void add_up_stretch(const AdaptiveNormCall& call, unsigned sample, unsigned first,
                               unsigned end, unsigned at, Sums<kSums, kWidth>& sums) {
  using Vector = Piece<Type, kWidth>;
  for (unsigned row = first + threadIdx.x / 32; row < end; row += kWarps) {
    const float rstd = call.rstd[row], mean = call.is_layer ? call.mean[row] : 0;
    float normed[kWidth], slopes[kWidth];
    ((const Vector*)row_of(call.input, row))[at].read(normed);
    ((const Vector*)row_of(call.grad_out, row))[at].read(slopes);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      normed[k] = (normed[k] - mean) * rstd;
      sums[0][k] += slopes[k] * normed[k];
      sums[1][k] += slopes[k];
    }
    if constexpr (kSums > 2) {
      if (call.grad_gate == nullptr) continue;
      float updates[kWidth], factors[kWidth], result[kWidth] = {};
      ((const Vector*)row_of(call.update, row))[at].read(updates);
      read_factors(call, sample, at, factors);
      if (call.grad_sum.data != nullptr) {
        ((const Vector*)row_of(call.grad_sum, row))[at].read(result);
      }
      const float along = call.slopes[2ll * row], shift = call.slopes[2ll * row + 1];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        result[k] += (slopes[k] * factors[k] - normed[k] * along - shift) * rstd;
        sums[2][k] += result[k] * updates[k];
      }
    }
  }
}

// The sums of backward_rows()' rows: of every worker, in the blocks' rows, a strip of columns a
// block.
template <int kBytes, int kSums>
__device__ void backward_sums(const AdaptiveNormCall& call) {
  constexpr int kWidth = kBytes / sizeof(Bits);
  __shared__ float shared[kWarps][kWidth][32];
  const unsigned strips = (call.columns / kWidth + 31) / 32;
  const unsigned worker = blockIdx.x / strips, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned at = blockIdx.x % strips * 32 + lane;
  const bool is_there = at < call.columns / kWidth;
  const unsigned end = min(worker * call.stretch + call.stretch, call.rows);
  wait_for_inputs();
  for (unsigned first = worker * call.stretch; first < end;) {
    const unsigned sample = first / call.tokens, stop = min((sample + 1) * call.tokens, end);
    Sums<kSums, kWidth> sums = {};
    if (is_there) add_up_stretch<kSums, kWidth>(call, sample, first, stop, at, sums);
#pragma unroll
    for (int kind = 0; kind < kSums; ++kind) {
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kWidth; ++k) shared[warp][k][lane] = sums[kind][k];
      __syncthreads();
      if (warp > 0) continue;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        sums[kind][k] = 0;
        for (int other = 0; other < kWarps; ++other) sums[kind][k] += shared[other][k][lane];
      }
    }
    if (warp == 0 && is_there) keep_sums<kSums, kWidth>(call, worker, sample, at, sums);
    first = stop;
  }
}
