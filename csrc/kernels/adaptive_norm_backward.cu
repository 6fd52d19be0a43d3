// The gradients of adaptive norms. Compiled when the package is built (cmake/compile_kernels.py),
// once for each type of the rows; adaptive_norm_cuda.cpp launches it.
//
// Workers go from row to row as the blocks of norm_backward.cu do, the next rows on their way
// through shared memory. What belongs to a column stays with its thread: the factor from sample to
// sample, and the sums (adaptive_norm.cuh).

#include "adaptive_norm_any.cuh"
#include "adaptive_norm_blocks.cuh"
#include "adaptive_norm_odd.cuh"
#include "adaptive_norm_single.cuh"
#include "row_pipeline.cuh"

namespace {

// Rows go through shared memory: each thread reads its pieces there twice, so that its registers
// have the sums alone and a multiprocessor has room for more threads.
template <int kBytes, int kVectors, int kStages, bool kIsGated>
__device__ void backward(const AdaptiveNormCall& call) {
  constexpr int kWidth = kBytes / sizeof(Bits);
  // The widest rows of gated sums leave no room for what can be read where it lies.
  constexpr bool kIsWidest = kIsGated && kVectors == 4;
  constexpr int kSums = kIsGated ? 3 : 2, kTensors = kIsWidest ? 3 : kIsGated ? 4 : 2;
  using Vector = Piece<Type, kWidth>;
  using Pipe = Pipeline<kBytes, kVectors, kStages, kTensors>;
  alignas(16) __shared__ float scratch[2][2][kMostWarps];
  // A warp's, where it has five pieces a thread.
  const unsigned group = kVectors == 5 ? 32 : call.group, thread = threadIdx.x % group;
  const unsigned vectors = call.columns / kWidth;
  const unsigned worker = blockIdx.x * (blockDim.x / group) + threadIdx.x / group;
  const unsigned first = worker * call.stretch;
  const unsigned end = worker < call.workers ? min(first + call.stretch, call.rows) : 0;
  const Pipe pipe{group, call.row_bytes};
  const auto load = [&](unsigned row, unsigned stage) {
    if (row < end) {
      pipe.load(stage, 0, row_of(call.input, row), vectors);
      pipe.load(stage, 1, row_of(call.grad_out, row), vectors);
      if constexpr (kIsGated) {
        pipe.load(stage, 2, row_of(call.update, row), vectors);
      }
      if (kTensors > 3 && call.grad_sum.data != nullptr) {
        pipe.load(stage, 3, row_of(call.grad_sum, row), vectors);
      }
    }
    Pipe::commit();
  };
  const float per_column = 1.0f / call.columns;
  Sums<kSums, kWidth> sums[kVectors];
  Factors<kVectors, kWidth> factors(pipe.behind());
  clear(scratch);
  wait_for_inputs();
  let_next_start();
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) load(first + stage, stage);
  // Asked for a turn ahead, as the rows are.
  float next_rstd = 0, next_mean = 0;
  const auto load_moments = [&](unsigned row) {
    if (row >= end) return;
    next_rstd = call.rstd[row];
    if (call.is_layer) next_mean = call.mean[row];
  };
  load_moments(first);
  unsigned sample = 0, next = 0;  // the rows of the sample end before row `next`
  unsigned stage = 0, freed = kStages - 1;
  for (unsigned turn = 0; turn < call.stretch; ++turn) {
    const unsigned row = first + turn;
    const bool is_row = row < end;
    load(row + kStages - 1, freed);
    // The first row of a sample, or the worker's.
    if (is_row && (row == next || turn == 0)) {
      sample = row / call.tokens;
      next = (sample + 1) * call.tokens;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const unsigned at = thread + v * group;
        float values[kWidth] = {};
        if constexpr (!kIsWidest) {
          if (at < vectors) read_factors(call, sample, at, values);
          factors.keep(v, values);
        }
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
#pragma unroll
          for (int k = 0; k < kWidth; ++k) sums[v][i][k] = 0;
        }
      }
    }
    const float rstd = next_rstd, mean = next_mean;
    load_moments(row + 1);
    pipe.wait();
    const auto read = [&](int v, int tensor, float (&values)[kWidth]) {
      pipe.pieces(stage, tensor, nullptr)[v].read(values);
    };
    const auto read_own = [&](int v, float (&values)[kWidth]) {
      if constexpr (kIsWidest) {
        read_factors(call, sample, thread + v * group, values);
      } else {
        factors.read(v, values);
      }
    };
    float of_row[2] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!is_row || thread + v * group >= vectors) continue;
      float normed[kWidth], slopes[kWidth], own[kWidth];
      read(v, 0, normed);
      read(v, 1, slopes);
      read_own(v, own);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        normed[k] = (normed[k] - mean) * rstd;
        sums[v][0][k] += slopes[k] * normed[k];
        sums[v][1][k] += slopes[k];
        slopes[k] *= own[k];
        of_row[0] += slopes[k] * normed[k];
        of_row[1] += slopes[k];
      }
    }
    sum_up_both(of_row, group, scratch[turn % 2]);
    // Of the input less its mean, and of all alike.
    const float along = -of_row[0] * per_column * rstd * rstd;
    const float shift = call.is_layer ? -of_row[1] * per_column * rstd : 0;
    const long long dense = (long long)row * vectors;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const unsigned at = thread + v * group;
      if (!is_row || at >= vectors) continue;
      float inputs[kWidth], slopes[kWidth], own[kWidth], result[kWidth];
      read(v, 0, inputs);
      read(v, 1, slopes);
      read_own(v, own);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        result[k] = (inputs[k] - mean) * along + shift + slopes[k] * own[k] * rstd;
      }
      if (call.grad_sum.data != nullptr) {
        float more[kWidth];
        if constexpr (kTensors > 3) {
          read(v, 3, more);
        } else {
          ((const Vector*)row_of(call.grad_sum, row))[at].read(more);
        }
#pragma unroll
        for (int k = 0; k < kWidth; ++k) result[k] += more[k];
      }
      if (call.out != nullptr) ((Vector*)call.out)[dense + at] = Vector::of(result);
      if constexpr (kIsGated) {
        float updates[kWidth];
        read(v, 2, updates);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) sums[v][2][k] += result[k] * updates[k];
        if (call.grad_update != nullptr) {
          float gates[kWidth];
          gate_of(call, sample).read(at, gates);
#pragma unroll
          for (int k = 0; k < kWidth; ++k) result[k] *= gates[k];
          ((Vector*)call.grad_update)[dense + at] = Vector::of(result);
        }
      }
      if (row + 1 == next || row + 1 == end) {
        keep_sums<kSums, kWidth>(call, worker, sample, at, sums[v]);
      }
    }
    freed = stage;
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}

}  // namespace

#define ADAPTIVE_NORM(name, threads, blocks, ...)                           \
  extern "C" __global__ void __launch_bounds__(threads, blocks)             \
      adaptive_norm_##name(const __grid_constant__ AdaptiveNormCall call) { \
    __VA_ARGS__(call);                                                      \
  }

// How many threads a multiprocessor has room for is what adaptive_norm_launch.cpp counts on.
ADAPTIVE_NORM(backward_16_1, 256, 4, backward<16, 1, 3, false>)
ADAPTIVE_NORM(backward_16_2, 384, 2, backward<16, 2, 3, false>)
ADAPTIVE_NORM(backward_16_3, 320, 2, backward<16, 3, 2, false>)
ADAPTIVE_NORM(backward_16_4, 512, 1, backward<16, 4, 2, false>)
ADAPTIVE_NORM(backward_16_5, 64, 8, backward<16, 5, 2, false>)
ADAPTIVE_NORM(backward_odd_8, 512, 2, backward_odd<8, 3, false>)
ADAPTIVE_NORM(backward_odd_32, 512, 1, backward_odd<32, 3, false>)
ADAPTIVE_NORM(gated_backward_16_1, 256, 3, backward<16, 1, 3, true>)
ADAPTIVE_NORM(gated_backward_16_2, 320, 2, backward<16, 2, 2, true>)
ADAPTIVE_NORM(gated_backward_16_3, 512, 1, backward<16, 3, 2, true>)
ADAPTIVE_NORM(gated_backward_16_4, 512, 1, backward<16, 4, 2, true>)
ADAPTIVE_NORM(gated_backward_odd_8, 512, 2, backward_odd<8, 3, true>)
ADAPTIVE_NORM(gated_backward_odd_32, 384, 1, backward_odd<32, 2, true>)
ADAPTIVE_NORM(backward_blocks, 512, 1, backward_blocks<3, false>)
ADAPTIVE_NORM(gated_backward_blocks, 512, 1, backward_blocks<2, true>)
ADAPTIVE_NORM(backward_single_1, 256, 4, backward_single<1, false>)
ADAPTIVE_NORM(backward_single_2, 320, 4, backward_single<2, false>)
ADAPTIVE_NORM(backward_single_4, 512, 2, backward_single<4, false>)
ADAPTIVE_NORM(backward_single_odd, 512, 1, backward_single_odd<false>)
ADAPTIVE_NORM(gated_backward_single_1, 256, 4, backward_single<1, true>)
ADAPTIVE_NORM(gated_backward_single_2, 320, 3, backward_single<2, true>)
ADAPTIVE_NORM(gated_backward_single_4, 512, 1, backward_single<4, true>)
ADAPTIVE_NORM(gated_backward_single_odd, 512, 1, backward_single_odd<true>)
ADAPTIVE_NORM(backward_rows_16, 512, 1, backward_rows<16>)
ADAPTIVE_NORM(backward_rows_n, 512, 1, backward_rows<n>)
ADAPTIVE_NORM(backward_sums_16, 512, 1, backward_sums<16, 2>)
ADAPTIVE_NORM(backward_sums_n, 512, 1, backward_sums<n, 2>)
ADAPTIVE_NORM(gated_backward_sums_16, 512, 1, backward_sums<16, 3>)
ADAPTIVE_NORM(gated_backward_sums_n, 512, 1, backward_sums<n, 3>)
ADAPTIVE_NORM(totals, 512, 1, totals<2>)
ADAPTIVE_NORM(gated_totals, 512, 1, totals<3>)
