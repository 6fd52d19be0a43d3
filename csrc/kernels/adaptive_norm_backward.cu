// The gradients of adaptive norms. Compiled when the package is built (cmake/compile_kernels.py),
// once for each type of the rows; adaptive_norm_cuda.cpp launches it.
//
// Workers go from row to row as the blocks of norm_backward.cu do, the next rows on their way
// through shared memory. What belongs to a column stays with its thread: the factor from sample to
// sample, and the sums (adaptive_norm.cuh).

#include "adaptive_norm_any.cuh"
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
    // Threads that have copied the row together have all done with the one before it once they
    // have met, and not earlier.
    if constexpr (Pipe::kIsWhole) pipe.template wait<kStages - 2>();
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
    if constexpr (!Pipe::kIsWhole) pipe.wait();
    const auto read = [&](int v, int tensor, const NormRows& rows, float (&values)[kWidth]) {
      pipe.pieces(stage, tensor, Pipe::kIsWhole ? row_of(rows, row) : nullptr)[v].read(values);
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
      read(v, 0, call.input, normed);
      read(v, 1, call.grad_out, slopes);
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
      read(v, 0, call.input, inputs);
      read(v, 1, call.grad_out, slopes);
      read_own(v, own);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float slope = slopes[k] * own[k];
        result[k] = (inputs[k] - mean) * along + shift;
        // Of a row of one number nothing is left if this is rounded as `shift` was, and not fused.
        result[k] += kWidth == 1 ? __fmul_rn(slope, rstd) : slope * rstd;
      }
      if (call.grad_sum.data != nullptr) {
        float more[kWidth];
        if constexpr (kTensors > 3) {
          read(v, 3, call.grad_sum, more);
        } else {
          ((const Vector*)row_of(call.grad_sum, row))[at].read(more);
        }
#pragma unroll
        for (int k = 0; k < kWidth; ++k) result[k] += more[k];
      }
      if (call.out != nullptr) ((Vector*)call.out)[dense + at] = Vector::of(result);
      if constexpr (kIsGated) {
        float updates[kWidth];
        read(v, 2, call.update, updates);
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

// Samples of a single row: there is nothing to add up over rows, so that blocks come and go with
// their rows in registers, as those of norm_forward.cu do.
template <int kBytes, int kVectors, bool kIsGated>
__device__ void backward_single(const AdaptiveNormCall& call) {
  constexpr int kWidth = kBytes / sizeof(Bits);
  using Vector = Piece<Type, kWidth>;
  alignas(16) __shared__ float scratch[2][kMostWarps];
  const unsigned group = call.group, thread = threadIdx.x % group;
  const unsigned row = blockIdx.x * (blockDim.x / group) + threadIdx.x / group;
  const unsigned vectors = row < call.rows ? call.columns / kWidth : 0;
  const bool has_more = call.grad_sum.data != nullptr;
  clear(scratch);
  wait_for_inputs();
  let_next_start();
  // What is read comes before what is written: the compiler cannot know that it is not the same
  // memory.
  Vector inputs[kVectors], grads[kVectors], updates[kVectors], more[kVectors];
  float slopes[kVectors][kWidth], gates[kIsGated ? kVectors : 1][kWidth];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const unsigned at = thread + v * group;
    if (at >= vectors) continue;
    inputs[v] = load_whole((const Vector*)row_of(call.input, row) + at);
    grads[v] = load_whole((const Vector*)row_of(call.grad_out, row) + at);
    if (has_more) more[v] = load_whole((const Vector*)row_of(call.grad_sum, row) + at);
    if constexpr (kIsGated) updates[v] = load_whole((const Vector*)row_of(call.update, row) + at);
    read_factors(call, row, at, slopes[v]);
  }
  const bool is_row = row < call.rows;
  const float rstd = is_row ? call.rstd[row] : 0;
  const float mean = is_row && call.is_layer ? call.mean[row] : 0;
  float of_row[2] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const unsigned at = thread + v * group;
    if (at >= vectors) continue;
    float normed[kWidth];
    Sums<2, kWidth> own;
    inputs[v].read(normed);
    grads[v].read(own[1]);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      normed[k] = (normed[k] - mean) * rstd;
      own[0][k] = own[1][k] * normed[k];
      slopes[v][k] *= own[1][k];
      of_row[0] += slopes[v][k] * normed[k];
      of_row[1] += slopes[v][k];
    }
    write_gradients<2, kWidth>(call, row, at, own);
  }
  if constexpr (kIsGated) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (thread + v * group < vectors) gate_of(call, row).read(thread + v * group, gates[v]);
    }
  }
  sum_up_both(of_row, group, scratch);
  const float along = -of_row[0] / call.columns * rstd * rstd;
  const float shift = call.is_layer ? -of_row[1] / call.columns * rstd : 0;
  const long long dense = (long long)row * vectors;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const unsigned at = thread + v * group;
    if (at >= vectors) continue;
    float result[kWidth];
    inputs[v].read(result);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      result[k] = (result[k] - mean) * along + shift + slopes[v][k] * rstd;
    }
    if (has_more) more[v].add_to(result);
    if (call.out != nullptr) ((Vector*)call.out)[dense + at] = Vector::of(result);
    if constexpr (kIsGated) {
      float products[kWidth];
      updates[v].read(products);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        products[k] *= result[k];
        result[k] *= gates[v][k];
      }
      write_piece(call.grad_gate, call.is_grad_gate_float, call, row, at, products);
      if (call.grad_update != nullptr) {
        ((Vector*)call.grad_update)[dense + at] = Vector::of(result);
      }
    }
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
ADAPTIVE_NORM(backward_n_2, 256, 4, backward<n, 2, 3, false>)
ADAPTIVE_NORM(backward_n_8, 512, 2, backward<n, 8, 3, false>)
ADAPTIVE_NORM(gated_backward_16_1, 256, 3, backward<16, 1, 3, true>)
ADAPTIVE_NORM(gated_backward_16_2, 320, 2, backward<16, 2, 2, true>)
ADAPTIVE_NORM(gated_backward_16_3, 512, 1, backward<16, 3, 2, true>)
ADAPTIVE_NORM(gated_backward_16_4, 512, 1, backward<16, 4, 2, true>)
ADAPTIVE_NORM(gated_backward_n_2, 256, 4, backward<n, 2, 3, true>)
ADAPTIVE_NORM(gated_backward_n_8, 512, 1, backward<n, 8, 3, true>)
ADAPTIVE_NORM(backward_single_16_1, 256, 4, backward_single<16, 1, false>)
ADAPTIVE_NORM(backward_single_16_2, 384, 2, backward_single<16, 2, false>)
ADAPTIVE_NORM(backward_single_16_4, 512, 1, backward_single<16, 4, false>)
ADAPTIVE_NORM(gated_backward_single_16_1, 256, 3, backward_single<16, 1, true>)
ADAPTIVE_NORM(gated_backward_single_16_2, 320, 2, backward_single<16, 2, true>)
ADAPTIVE_NORM(gated_backward_single_16_4, 512, 1, backward_single<16, 4, true>)
ADAPTIVE_NORM(backward_rows_16, 512, 1, backward_rows<16>)
ADAPTIVE_NORM(backward_rows_n, 512, 1, backward_rows<n>)
ADAPTIVE_NORM(backward_sums_16, 512, 1, backward_sums<16, 2>)
ADAPTIVE_NORM(backward_sums_n, 512, 1, backward_sums<n, 2>)
ADAPTIVE_NORM(gated_backward_sums_16, 512, 1, backward_sums<16, 3>)
ADAPTIVE_NORM(gated_backward_sums_n, 512, 1, backward_sums<n, 3>)
ADAPTIVE_NORM(totals, 512, 1, totals<2>)
ADAPTIVE_NORM(gated_totals, 512, 1, totals<3>)
