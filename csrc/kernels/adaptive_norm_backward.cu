// The gradients of adaptive norms. Compiled when the package is built (cmake/compile_kernels.py),
// once for each type of the rows; adaptive_norm_cuda.cpp launches it.
//
// Workers go from row to row as the blocks of norm_backward.cu do, the next rows on their way
// through shared memory. What belongs to a column stays in registers: the factor from sample to
// sample, and the sums (adaptive_norm.cuh).

#include "adaptive_norm.cuh"
#include "row_pipeline.cuh"

namespace {

// Numbers a thread keeps in registers beside those that it works on.
constexpr int kMostKept = 16;

template <int kBytes, int kVectors, int kStages, bool kIsGated>
__device__ void backward(const AdaptiveNormCall& call) {
  constexpr int kWidth = kBytes / sizeof(Bits);
  constexpr int kSums = kIsGated ? 3 : 2;
  constexpr bool kKeeps = kVectors * kWidth <= kMostKept;
  constexpr int kKept = kKeeps ? kVectors : 1;
  using Vector = Piece<Type, kWidth>;
  using Pipe = Pipeline<kBytes, kVectors, kStages, kSums>;
  __shared__ float scratch[2][2][32];
  const unsigned group = call.group, thread = threadIdx.x % group;
  const unsigned vectors = call.columns / kWidth;
  const unsigned worker = blockIdx.x * (blockDim.x / group) + threadIdx.x / group;
  const unsigned first = worker * call.stretch;
  const unsigned end = worker < call.workers ? min(first + call.stretch, call.rows) : 0;
  const Pipe pipe{group, 0};
  const auto load = [&](unsigned row, unsigned stage) {
    if (row < end) {
      pipe.load(stage, 0, row_of(call.input, row), vectors);
      pipe.load(stage, 1, row_of(call.grad_out, row), vectors);
      if constexpr (kIsGated) pipe.load(stage, 2, row_of(call.update, row), vectors);
    }
    Pipe::commit();
  };
  const float per_column = 1.0f / call.columns;
  Sums<kSums, kWidth> sums[kVectors];
  float factors[kKept][kWidth], normed[kKept][kWidth], slopes[kKept][kWidth];
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
  for (unsigned turn = 0; turn < call.stretch; ++turn) {
    const unsigned row = first + turn, stage = turn % kStages;
    const bool is_row = row < end;
    load(row + kStages - 1, (turn + kStages - 1) % kStages);
    // The first row of a sample, or the worker's.
    if (is_row && (row == next || turn == 0)) {
      sample = row / call.tokens;
      next = (sample + 1) * call.tokens;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if constexpr (kKeeps) {
          const unsigned at = thread + v * group;
          if (at < vectors) read_factors(call, sample, at, factors[v]);
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
    const auto inputs = pipe.pieces(stage, 0, nullptr);
    const auto grads = pipe.pieces(stage, 1, nullptr);
    const auto read = [&](int v, int kept) {
      inputs[v].read(normed[kept]);
      grads[v].read(slopes[kept]);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) normed[kept][k] = (normed[kept][k] - mean) * rstd;
      if constexpr (!kKeeps) read_factors(call, sample, thread + v * group, factors[kept]);
    };
    float of_row[2] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int kept = kKeeps ? v : 0;
      if (!is_row || thread + v * group >= vectors) continue;
      read(v, kept);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        sums[v][0][k] += slopes[kept][k] * normed[kept][k];
        sums[v][1][k] += slopes[kept][k];
        slopes[kept][k] *= factors[kept][k];
        of_row[0] += slopes[kept][k] * normed[kept][k];
        of_row[1] += slopes[kept][k];
      }
    }
    sum_up(of_row, group, scratch[turn % 2]);
    if (!is_row) continue;
    const float along = of_row[0] * per_column * rstd;
    const float shift = call.is_layer ? of_row[1] * per_column * rstd : 0;
    const auto* more =
        call.grad_sum.data == nullptr ? nullptr : (const Vector*)row_of(call.grad_sum, row);
    const long long dense = (long long)row * vectors;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int kept = kKeeps ? v : 0;
      const unsigned at = thread + v * group;
      if (at >= vectors) continue;
      if constexpr (!kKeeps) {
        read(v, kept);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) slopes[kept][k] *= factors[kept][k];
      }
      float result[kWidth] = {};
      if (more != nullptr) {
        const Vector piece = more[at];
        piece.read(result);
      }
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        result[k] += slopes[kept][k] * rstd - normed[kept][k] * along - shift;
      }
      if (call.out != nullptr) ((Vector*)call.out)[dense + at] = Vector::of(result);
      if constexpr (kIsGated) {
        float updates[kWidth];
        pipe.pieces(stage, 2, nullptr)[v].read(updates);
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
  }
}

// Rows that no kernel above has room for, or whose pieces are single numbers, read twice: the
// input's gradient of a row a block, and what the sums need of the row.
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

}  // namespace

#define ADAPTIVE_NORM(name, threads, ...)                                   \
  extern "C" __global__ void __launch_bounds__(threads, 1)                  \
      adaptive_norm_##name(const __grid_constant__ AdaptiveNormCall call) { \
    __VA_ARGS__(call);                                                      \
  }

ADAPTIVE_NORM(backward_16_1, 256, backward<16, 1, 3, false>)
ADAPTIVE_NORM(backward_16_2, 512, backward<16, 2, 3, false>)
ADAPTIVE_NORM(backward_16_4, 512, backward<16, 4, 2, false>)
ADAPTIVE_NORM(gated_backward_16_1, 256, backward<16, 1, 3, true>)
ADAPTIVE_NORM(gated_backward_16_2, 512, backward<16, 2, 3, true>)
ADAPTIVE_NORM(gated_backward_16_4, 512, backward<16, 4, 2, true>)
ADAPTIVE_NORM(backward_rows_16, 512, backward_rows<16>)
ADAPTIVE_NORM(backward_rows_n, 512, backward_rows<n>)
ADAPTIVE_NORM(backward_sums_16, 512, backward_sums<16, 2>)
ADAPTIVE_NORM(backward_sums_n, 512, backward_sums<n, 2>)
ADAPTIVE_NORM(gated_backward_sums_16, 512, backward_sums<16, 3>)
ADAPTIVE_NORM(gated_backward_sums_n, 512, backward_sums<n, 3>)
ADAPTIVE_NORM(totals, 512, totals<2>)
ADAPTIVE_NORM(gated_totals, 512, totals<3>)
