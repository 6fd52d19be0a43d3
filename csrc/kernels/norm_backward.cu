// The gradients of layer norm and RMS norm of rows. Compiled when the package is built
// (cmake/compile_kernels.py), once for each type of the rows; norm_rows_cuda.cpp launches it.
//
// Blocks stay and go from row to row, the next rows on their way through shared memory meanwhile.
// What belongs to a column (weight, sums of the gradients) stays in registers.

#include "column_sums.cuh"
#include "norm_rows.cuh"
#include "row_pipeline.cuh"

namespace {

// Numbers a thread keeps in registers beside those that it works on.
constexpr int kMostKept = 16;

__device__ void write_gradient(const NormCall& call, bool is_weight, unsigned column, float value) {
  void* out = is_weight ? call.grad_weight : call.grad_bias;
  if (out == nullptr) return;
  if (is_weight ? call.is_weight_float : call.is_bias_float) {
    ((float*)out)[column] = value;
  } else {
    ((Bits*)out)[column] = Type::write(value);
  }
}

// The sums of a block, as a row of `partial`. Its groups add up through shared memory, in a fixed
// order.
template <int kVectors, int kWidth>
__device__ void write_sums(const NormCall& call, bool is_weight,
                           const float (&sums)[kVectors][kWidth], float* shared) {
  const unsigned group = call.group, groups = blockDim.x / group;
  const unsigned thread = threadIdx.x % group, vectors = call.columns / kWidth;
  float* partial =
      call.partial + (long long)((is_weight ? 0 : gridDim.x) + blockIdx.x) * call.columns;
  const bool is_last = gridDim.x == 1;
  if (groups == 1) {
    void* to = !is_last ? partial : is_weight ? call.grad_weight : call.grad_bias;
    if (to == nullptr) return;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const unsigned at = thread + v * group;
      if (at >= vectors) continue;
      if (!is_last || (is_weight ? call.is_weight_float : call.is_bias_float)) {
        ((Piece<Float, kWidth>*)to)[at] = Piece<Float, kWidth>::of(sums[v]);
      } else {
        ((Piece<Type, kWidth>*)to)[at] = Piece<Type, kWidth>::of(sums[v]);
      }
    }
    return;
  }
  __syncthreads();
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      shared[(v * kWidth + k) * blockDim.x + threadIdx.x] = sums[v][k];
    }
  }
  __syncthreads();
  for (unsigned column = threadIdx.x; column < call.columns; column += blockDim.x) {
    const unsigned at = column / kWidth, k = column % kWidth;
    const float* values = shared + (at / group * kWidth + k) * blockDim.x + at % group;
    float sum = 0;
    for (unsigned other = 0; other < groups; ++other) sum += values[other * group];
    if (is_last) {
      write_gradient(call, is_weight, column, sum);
    } else {
      partial[column] = sum;
    }
  }
}

// What a thread sums up for its columns is, at the end, one row of `partial`, which norm_columns
// adds up; of a single block it is the result. Of the widest rows nothing is left for the sums:
// norm_partial computes them.
template <int kBytes, int kVectors>
constexpr bool kHasSums = kBytes < 16 || kVectors < 8;

template <int kBytes, int kVectors, bool kIsLayer, int kStages = kHasSums<kBytes, kVectors> ? 3 : 1>
__device__ void backward(const NormCall& call) {
  constexpr int kWidth = kBytes / sizeof(Bits);
  constexpr bool kSums = kHasSums<kBytes, kVectors>;
  constexpr bool kKeeps = kVectors * kWidth <= kMostKept;
  constexpr int kKept = kKeeps ? kVectors : 1;
  using Vector = Piece<Type, kWidth>;
  using Pipe = Pipeline<kBytes, kVectors, kStages>;
  extern __shared__ uint4 memory[];
  __shared__ float scratch[2][2][32];
  const unsigned group = call.group, thread = threadIdx.x % group;
  const unsigned groups = blockDim.x / group, vectors = call.columns / kWidth;
  const Pipe pipe{group, call.row_bytes};
  const auto load = [&](unsigned first, unsigned stage) {
    const unsigned row = first + threadIdx.x / group;
    if (row < call.rows) {
      pipe.load(stage, 0, row_of(call.input, row), vectors);
      pipe.load(stage, 1, row_of(call.grad_out, row), vectors);
    }
    Pipe::commit();
  };
  const Parameter factor = factor_of(call);
  const float per_column = 1.0f / call.columns;
  float grad_weight[kSums ? kVectors : 1][kWidth] = {};
  float grad_bias[kSums && kIsLayer ? kVectors : 1][kWidth] = {};
  float weights[kKept][kWidth], normed[kKept][kWidth], slopes[kKept][kWidth];
  const unsigned step = gridDim.x * groups;
  unsigned first = blockIdx.x * groups;
  wait_for_inputs();
  let_next_start();
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) load(first + stage * step, stage);
  if constexpr (kKeeps) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (thread + v * group < vectors) factor.read(thread + v * group, weights[v]);
    }
  }
  // Asked for a turn ahead, as the rows are.
  float next_rstd = 0, next_mean = 0;
  const auto load_stats = [&](unsigned row) {
    if (row >= call.rows) return;
    next_rstd = call.rstd[row];
    if (kIsLayer) next_mean = call.mean[row];
  };
  load_stats(first + threadIdx.x / group);
  for (unsigned turn = 0; first < call.rows; first += step, ++turn) {
    load(first + (kStages - 1) * step, (turn + kStages - 1) % kStages);
    const unsigned row = first + threadIdx.x / group, stage = turn % kStages;
    const bool is_row = row < call.rows;
    const float rstd = next_rstd, mean = kIsLayer ? next_mean : 0;
    load_stats(row + step);
    pipe.wait();
    // The normed input, and the gradient of it: the output's, first without the weight.
    const auto inputs = pipe.pieces(stage, 0, row_of(call.input, row));
    const auto grads = pipe.pieces(stage, 1, row_of(call.grad_out, row));
    const auto read = [&](int v, int kept) {
      inputs[v].read(normed[kept]);
      grads[v].read(slopes[kept]);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) normed[kept][k] = (normed[kept][k] - mean) * rstd;
      if constexpr (!kKeeps) factor.read(thread + v * group, weights[kept]);
    };
    float sums[kIsLayer ? 2 : 1] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int kept = kKeeps ? v : 0;
      if (!is_row || thread + v * group >= vectors) continue;
      read(v, kept);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if constexpr (kSums) grad_weight[v][k] += slopes[kept][k] * normed[kept][k];
        if constexpr (kSums && kIsLayer) grad_bias[v][k] += slopes[kept][k];
        slopes[kept][k] *= weights[kept][k];
        sums[0] += slopes[kept][k] * normed[kept][k];
        if constexpr (kIsLayer) sums[1] += slopes[kept][k];
      }
    }
    sum_up(sums, group, scratch[turn % 2]);
    if (!is_row || call.out == nullptr) continue;
    const float along = sums[0] * per_column * rstd;
    const float shift = kIsLayer ? sums[kIsLayer ? 1 : 0] * per_column * rstd : 0;
    const auto* more =
        call.grad_sum.data == nullptr ? nullptr : (const Vector*)row_of(call.grad_sum, row);
    auto* out = (Vector*)call.out + (long long)row * vectors;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int kept = kKeeps ? v : 0;
      const unsigned at = thread + v * group;
      if (at >= vectors) continue;
      if constexpr (!kKeeps) {
        read(v, kept);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) slopes[kept][k] *= weights[kept][k];
      }
      float result[kWidth] = {};
      if (more != nullptr) more[at].read(result);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        result[k] += slopes[kept][k] * rstd - normed[kept][k] * along - shift;
      }
      out[at] = Vector::of(result);
    }
  }
  if (!kSums || call.partial == nullptr) return;
  wait_for_copies();
  if constexpr (kSums) write_sums<kVectors, kWidth>(call, true, grad_weight, (float*)memory);
  if constexpr (kSums && kIsLayer) {
    write_sums<kVectors, kWidth>(call, false, grad_bias, (float*)memory);
  }
}

// The gradient of a row of any size, a block's, read twice.
template <int kBytes>
__device__ void backward_row(const NormCall& call, unsigned row) {
  using Row = AnyRow<kBytes>;
  using Vector = typename Row::Vector;
  constexpr int kWidth = Row::kWidth;
  __shared__ float scratch[2][32];
  const unsigned vectors = call.columns / kWidth;
  const auto* input = (const Vector*)row_of(call.input, row);
  const auto* grad_out = (const Vector*)row_of(call.grad_out, row);
  const auto* more =
      call.grad_sum.data == nullptr ? nullptr : (const Vector*)row_of(call.grad_sum, row);
  const Parameter factor = factor_of(call);
  const float rstd = call.rstd[row], mean = call.is_layer ? call.mean[row] : 0;
  float sums[2] = {};
  Row::each(input, vectors, [&](const float (&x)[kWidth], unsigned at) {
    float slopes[kWidth], weights[kWidth];
    grad_out[at].read(slopes);
    factor.read(at, weights);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const float slope = slopes[k] * weights[k];
      sums[0] += slope * (x[k] - mean) * rstd;
      sums[1] += slope;
    }
  });
  sum_up(sums, blockDim.x, scratch);
  const float along = sums[0] / call.columns, shift = call.is_layer ? sums[1] / call.columns : 0;
  Vector* out = (Vector*)call.out + (long long)row * vectors;
  Row::each(input, vectors, [&](const float (&x)[kWidth], unsigned at) {
    float slopes[kWidth], weights[kWidth], result[kWidth] = {};
    grad_out[at].read(slopes);
    factor.read(at, weights);
    if (more != nullptr) more[at].read(result);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const float normed = (x[k] - mean) * rstd;
      result[k] += (slopes[k] * weights[k] - normed * along - shift) * rstd;
    }
    out[at] = Vector::of(result);
  });
}

template <int kBytes>
__device__ void backward_any(const NormCall& call) {
  wait_for_inputs();
  backward_row<kBytes>(call, blockIdx.x);
}

// Adds up, over every `step`-th warp's worth of rows from `first` on, the columns of a piece a
// lane; `write` gets each sum: whether it is the weight's, of which column, and what it is.
template <int kBytes, class Write>
__device__ void add_up_rows(const NormCall& call, unsigned strip, unsigned first, unsigned step,
                            const Write& write) {
  constexpr int kWidth = kBytes / sizeof(Bits);
  constexpr int kWarps = 16;
  using Vector = Piece<Type, kWidth>;
  __shared__ float shared[kWarps][kWidth][32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned at = strip * 32 + lane;
  float sums[2][kWidth] = {};
  if (at < call.columns / kWidth) {
#pragma unroll(kWidth > 2 ? 4 : 8)
    for (unsigned row = first * kWarps + warp; row < call.rows; row += step * kWarps) {
      const float rstd = call.rstd[row], mean = call.is_layer ? call.mean[row] : 0;
      float x[kWidth], slopes[kWidth];
      ((const Vector*)row_of(call.input, row))[at].read(x);
      ((const Vector*)row_of(call.grad_out, row))[at].read(slopes);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        sums[0][k] += slopes[k] * ((x[k] - mean) * rstd);
        sums[1][k] += slopes[k];
      }
    }
  }
  for (int kind = 0; kind < (call.is_layer ? 2 : 1); ++kind) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) shared[warp][k][lane] = kind == 0 ? sums[0][k] : sums[1][k];
    __syncthreads();
    for (unsigned i = threadIdx.x; i < 32 * kWidth; i += blockDim.x) {
      const unsigned column = strip * 32 * kWidth + i;
      float sum = 0;
      for (int other = 0; other < kWarps; ++other) sum += shared[other][i % kWidth][i / kWidth];
      if (column < call.columns) write(kind == 0, column, sum);
    }
    __syncthreads();
  }
}

// The sums over rows where backward() does not keep them: of every gridDim.y-th stretch of the rows
// a block.
template <int kBytes>
__device__ void partial(const NormCall& call) {
  wait_for_inputs();
  add_up_rows<kBytes>(call, blockIdx.x, blockIdx.y, gridDim.y,
                      [&](bool is_weight, unsigned column, float sum) {
                        const unsigned block = (is_weight ? 0 : gridDim.y) + blockIdx.y;
                        call.partial[(long long)block * call.columns + column] = sum;
                      });
}

// Of few rows: some blocks add up columns, each over all rows, and the others have a row each.
template <int kBytes>
__device__ void backward_few(const NormCall& call) {
  // Narrow strips of columns: more blocks share the sums.
  constexpr int kPiece = kBytes < 4 ? kBytes : 4;
  const unsigned strips = (call.columns * sizeof(Bits) / kPiece + 31) / 32;
  wait_for_inputs();
  if (blockIdx.x >= strips) return backward_row<kBytes>(call, blockIdx.x - strips);
  add_up_rows<kPiece>(call, blockIdx.x, 0, 1, [&](bool is_weight, unsigned column, float sum) {
    write_gradient(call, is_weight, column, sum);
  });
}

// Adds up the rows of `partial`: of the weight, then in the blocks' second row of the bias.
__device__ void columns(const NormCall& call) {
  const float* partial = call.partial + (long long)blockIdx.y * call.partials * call.columns;
  wait_for_inputs();
  add_up_columns(partial, call.partials, call.columns, [&](unsigned column, float sum) {
    write_gradient(call, blockIdx.y == 0, column, sum);
  });
}

}  // namespace

// With fewer rows under way, for GPUs with less shared memory (norm_launch.cpp).
#define NORM_STAGES(bytes, vectors, stages)                      \
  extern "C" __global__ void __launch_bounds__(512, 1)           \
      rms_norm_backward_##bytes##_##vectors##_stages_##stages(   \
          const __grid_constant__ NormCall call) {               \
    backward<bytes, vectors, false, stages>(call);               \
  }                                                              \
  extern "C" __global__ void __launch_bounds__(512, 1)           \
      layer_norm_backward_##bytes##_##vectors##_stages_##stages( \
          const __grid_constant__ NormCall call) {               \
    backward<bytes, vectors, true, stages>(call);                \
  }

NORM(backward, 16, 1, 256, 3)
NORM(backward, 16, 2, 512, 1)
NORM(backward, 16, 4, 512, 1)
NORM(backward, 16, 8, 512, 1)
NORM_STAGES(16, 4, 2)
NORM_STAGES(16, 4, 1)
NORM(backward, 8, 1, 256, 3)
NORM(backward, 8, 4, 512, 1)
NORM(backward, n, 2, 256, 3)
NORM(backward, n, 8, 512, 2)
NORM_ANY(backward_few_16, 512, backward_few<16>)
NORM_ANY(backward_few_n, 512, backward_few<n>)
NORM_ANY(backward_any_16, 1024, backward_any<16>)
NORM_ANY(backward_any_n, 512, backward_any<n>)
NORM_ANY(partial_16, 512, partial<16>)
NORM_ANY(partial_n, 512, partial<n>)
NORM_ANY(columns, 1024, columns)
