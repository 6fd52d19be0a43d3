// Layer norm and RMS norm of rows, and their gradients. Compiled when the package is built
// (cmake/compile_kernels.py), once for each type of the rows and each direction; norm_rows_cuda.cpp
// launches it.
//
// Blocks stay and go from row to row, the next rows on their way through shared memory meanwhile.
// What belongs to a column (weight, bias, sums of the gradients) stays in registers.

#include "column_sums.cuh"
#include "norm_rows_call.h"
#include "number.cuh"

namespace {

using Type = KERNEL_TYPE;
using Bits = Type::Bits;

// Numbers a thread keeps in registers beside those that it works on.
constexpr int kMostKept = 16;

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

  __device__ float at(unsigned column) const {
    if (data == nullptr) return otherwise;
    return (is_float ? ((const float*)data)[column] : Type::read(((const Bits*)data)[column])) +
           shift;
  }
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

// The sums over the `group` threads that share a row: lanes of a warp, a power of two of them, or
// the block, every thread of which must come here. `scratch` is free again after the next barrier.
template <int kSums>
__device__ void sum_up(float (&sums)[kSums], unsigned group, float (*scratch)[32]) {
  for (unsigned distance = (group < 32 ? group : 32) / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] += __shfl_xor_sync(~0u, sums[i], distance);
  }
  if (group <= 32) return;
  const unsigned lane = threadIdx.x % 32, warps = group / 32;
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    if (lane == 0) scratch[i][threadIdx.x / 32] = sums[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    sums[i] = lane < warps ? scratch[i][lane] : 0;
#pragma unroll
    for (unsigned distance = 16; distance > 0; distance /= 2) {
      sums[i] += __shfl_xor_sync(~0u, sums[i], distance);
    }
  }
}

// Of fewer bytes than kSize the rest is zero.
template <int kSize>
__device__ void copy_async(void* shared, const void* global, unsigned bytes) {
  const auto to = (unsigned)__cvta_generic_to_shared(shared);
  if constexpr (kSize == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
                 "r"(bytes));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(kSize));
  }
}

// Rows to come, on their way through shared memory. A thread copies the pieces that it needs, so
// that nobody waits for another. cp.async takes 4 bytes or more: where pieces are smaller the
// threads of a row copy all 16 bytes at a time that it lies in, and wait for each other.
template <int kBytes, int kVectors, int kStages>
struct Pipeline {
  using Vector = Piece<Type, kBytes / sizeof(Bits)>;
  static constexpr bool kIsWhole = kBytes < 4;

  unsigned tensors, group, row_bytes;  // NormCall's

  __device__ void load(unsigned stage, unsigned tensor, const Bits* row, unsigned vectors) const {
    const unsigned thread = threadIdx.x % group;
    if constexpr (kIsWhole) {
      const auto *first = (const unsigned char*)row, *end = first + vectors * kBytes;
      const unsigned char* from = first - (unsigned long long)first % 16;
      unsigned char* to = whole(stage, tensor);
      for (unsigned at = 16 * thread; from + at < end; at += 16 * group) {
        const auto left = end - (from + at);
        copy_async<16>(to + at, from + at, left < 16 ? left : 16);
      }
    } else {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const unsigned at = thread + v * group;
        if (at < vectors) copy_async<kBytes>(slot(stage, tensor, v), (const Vector*)row + at, kBytes);
      }
    }
  }
  // The thread's piece of `row`, which has arrived.
  __device__ const Vector& piece(unsigned stage, unsigned tensor, int v, const Bits* row) const {
    if constexpr (kIsWhole) {
      const unsigned char* first = whole(stage, tensor) + (unsigned long long)row % 16;
      return ((const Vector*)first)[threadIdx.x % group + v * group];
    } else {
      return *(const Vector*)slot(stage, tensor, v);
    }
  }
  static __device__ void commit() {
    asm volatile("cp.async.commit_group;");
  }
  // For all but the `kStages` - 1 last that were committed.
  __device__ void wait() const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
    if constexpr (kIsWhole) {
      if (group > 32) {
        __syncthreads();
      } else {
        __syncwarp();
      }
    }
  }

 private:
  static __device__ unsigned char* shared() {
    extern __shared__ uint4 memory[];
    return (unsigned char*)memory;
  }
  __device__ unsigned char* slot(unsigned stage, unsigned tensor, int v) const {
    return shared() +
           (((stage * tensors + tensor) * kVectors + v) * blockDim.x + threadIdx.x) * kBytes;
  }
  __device__ unsigned char* whole(unsigned stage, unsigned tensor) const {
    const unsigned groups = blockDim.x / group;
    return shared() +
           ((stage * tensors + tensor) * groups + threadIdx.x / group) * row_bytes;
  }
};

// kVectors pieces of kBytes a thread and row.
template <int kBytes, int kVectors, bool kIsLayer>
__device__ void forward(const NormCall& call) {
  constexpr int kWidth = kBytes / sizeof(Bits);
  constexpr int kStages = 3;
  constexpr bool kKeeps = kVectors * kWidth <= kMostKept;
  using Vector = Piece<Type, kWidth>;
  using Pipe = Pipeline<kBytes, kVectors, kStages>;
  __shared__ float scratch[2][2][1][32];
  const unsigned group = call.group, thread = threadIdx.x % group;
  const unsigned groups = blockDim.x / group, vectors = call.columns / kWidth;
  const bool has_residual = call.residual.data != nullptr;
  const Pipe pipe{has_residual ? 2U : 1U, group, call.row_bytes};
  const auto load = [&](unsigned first, unsigned stage) {
    const unsigned row = first + threadIdx.x / group;
    if (row < call.rows) {
      pipe.load(stage, 0, row_of(call.input, row), vectors);
      if (has_residual) pipe.load(stage, 1, row_of(call.residual, row), vectors);
    }
    Pipe::commit();
  };
  const Parameter factor = factor_of(call), bias = bias_of(call);
  const float per_column = 1.0f / call.columns;
  const unsigned step = gridDim.x * groups;
  unsigned first = blockIdx.x * groups;
  wait_for_inputs();
  let_next_start();
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) load(first + stage * step, stage);
  float weights[kKeeps ? kVectors : 1][kWidth], shifts[kKeeps ? kVectors : 1][kWidth];
  if constexpr (kKeeps) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const unsigned at = thread + v * group;
      if (at >= vectors) continue;
      factor.read(at, weights[v]);
      if (kIsLayer) bias.read(at, shifts[v]);
    }
  }
  for (unsigned turn = 0; first < call.rows; first += step, ++turn) {
    load(first + (kStages - 1) * step, (turn + kStages - 1) % kStages);
    pipe.wait();
    const unsigned row = first + threadIdx.x / group, stage = turn % kStages;
    const bool is_row = row < call.rows;
    float values[kVectors][kWidth];
    float sums[1] = {0};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const unsigned at = thread + v * group;
      if (!is_row || at >= vectors) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) values[v][k] = 0;
        continue;
      }
      pipe.piece(stage, 0, v, row_of(call.input, row)).read(values[v]);
      if (has_residual) {
        float other[kWidth];
        pipe.piece(stage, 1, v, row_of(call.residual, row)).read(other);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) values[v][k] += other[k];
        const Vector sum = Vector::of(values[v]);
        ((Vector*)call.sum)[(long long)row * vectors + at] = sum;
        sum.read(values[v]);  // the norm is of what is written
      }
#pragma unroll
      for (int k = 0; k < kWidth; ++k)
        sums[0] += kIsLayer ? values[v][k] : values[v][k] * values[v][k];
    }
    sum_up(sums, group, scratch[turn % 2][0]);
    const float mean = kIsLayer ? sums[0] * per_column : 0;
    if constexpr (kIsLayer) {
      sums[0] = 0;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (thread + v * group >= vectors) continue;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          values[v][k] -= mean;
          sums[0] += values[v][k] * values[v][k];
        }
      }
      sum_up(sums, group, scratch[turn % 2][1]);
    }
    if (!is_row) continue;
    const float rstd = rsqrtf(sums[0] * per_column + call.eps);
    if (thread == 0 && call.rstd != nullptr) call.rstd[row] = rstd;
    if (kIsLayer && thread == 0 && call.mean != nullptr) call.mean[row] = mean;
    auto* out = (Vector*)call.out + (long long)row * vectors;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const unsigned at = thread + v * group;
      if (at >= vectors) continue;
      constexpr int kFirst = 0;
      const int kept = kKeeps ? v : kFirst;
      if constexpr (!kKeeps) {
        factor.read(at, weights[kFirst]);
        if (kIsLayer) bias.read(at, shifts[kFirst]);
      }
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        values[v][k] *= rstd;
        values[v][k] *= weights[kept][k];
        if (kIsLayer) values[v][k] += shifts[kept][k];
      }
      out[at] = Vector::of(values[v]);
    }
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

// The norm of one row, a block's, each thread of which reads only pieces that it has written or that
// are the input's. `scratch` is free again after the next barrier.
template <int kBytes>
__device__ void norm_row(const NormCall& call, const Piece<Type, kBytes / sizeof(Bits)>* row_data,
                         unsigned row, float (*scratch)[1][32]) {
  using Row = AnyRow<kBytes>;
  using Vector = typename Row::Vector;
  const unsigned vectors = call.columns / Row::kWidth;
  float sums[1] = {0};
  float mean = 0;
  if (call.is_layer) {
    Row::each(row_data, vectors, [&](const float(&values)[Row::kWidth], unsigned) {
#pragma unroll
      for (int k = 0; k < Row::kWidth; ++k) sums[0] += values[k];
    });
    sum_up(sums, blockDim.x, scratch[0]);
    mean = sums[0] / call.columns;
    sums[0] = 0;
  }
  Row::each(row_data, vectors, [&](const float(&values)[Row::kWidth], unsigned) {
#pragma unroll
    for (int k = 0; k < Row::kWidth; ++k) sums[0] += (values[k] - mean) * (values[k] - mean);
  });
  sum_up(sums, blockDim.x, scratch[1]);
  const float rstd = rsqrtf(sums[0] / call.columns + call.eps);
  if (threadIdx.x == 0 && call.rstd != nullptr) call.rstd[row] = rstd;
  if (threadIdx.x == 0 && call.mean != nullptr) call.mean[row] = mean;
  const Parameter factor = factor_of(call), bias = bias_of(call);
  Vector* out = (Vector*)call.out + (long long)row * vectors;
  Row::each(row_data, vectors, [&](const float(&values)[Row::kWidth], unsigned at) {
    float weights[Row::kWidth], shifts[Row::kWidth], result[Row::kWidth];
    factor.read(at, weights);
    bias.read(at, shifts);
#pragma unroll
    for (int k = 0; k < Row::kWidth; ++k) {
      result[k] = (values[k] - mean) * rstd * weights[k] + shifts[k];
    }
    out[at] = Vector::of(result);
  });
}

// Adds a row's residual to it; the sum, which the norm is of, goes to `call.sum` and to `copy`.
template <int kBytes>
__device__ void add_residual(const NormCall& call, unsigned row,
                             const Piece<Type, kBytes / sizeof(Bits)>* input,
                             Piece<Type, kBytes / sizeof(Bits)>* copy) {
  using Row = AnyRow<kBytes>;
  using Vector = typename Row::Vector;
  const unsigned vectors = call.columns / Row::kWidth;
  const auto* residual = (const Vector*)row_of(call.residual, row);
  Vector* sum = (Vector*)call.sum + (long long)row * vectors;
  Row::each(input, vectors, [&](float(&values)[Row::kWidth], unsigned at) {
    float other[Row::kWidth];
    residual[at].read(other);
#pragma unroll
    for (int k = 0; k < Row::kWidth; ++k) values[k] += other[k];
    sum[at] = Vector::of(values);
    if (copy != nullptr) copy[at] = sum[at];
  });
}

// Rows of any size and alignment, a block each.
__device__ void forward_any(const NormCall& call) {
  using Vector = Piece<Type, 1>;
  __shared__ float scratch[2][1][32];
  const unsigned row = blockIdx.x;
  wait_for_inputs();
  const auto* input = (const Vector*)row_of(call.input, row);
  if (call.residual.data != nullptr) {
    add_residual<sizeof(Bits)>(call, row, input, nullptr);
    input = (const Vector*)call.sum + (long long)row * call.columns;
  }
  norm_row<sizeof(Bits)>(call, input, row, scratch);
}

// Rows that are too long for registers and that shared memory has room for: one of them, or two,
// the next one on its way.
__device__ void forward_wide(const NormCall& call) {
  using Vector = Piece<Type, 16 / sizeof(Bits)>;
  extern __shared__ uint4 memory[];
  __shared__ float scratch[2][2][1][32];
  const unsigned vectors = call.columns / (16 / sizeof(Bits));
  const auto load = [&](unsigned row, unsigned stage) {
    if (row < call.rows) {
      const auto* input = (const Vector*)row_of(call.input, row);
      for (unsigned at = threadIdx.x; at < vectors; at += blockDim.x) {
        copy_async<16>(memory + stage * vectors + at, input + at, 16);
      }
    }
    asm volatile("cp.async.commit_group;");
  };
  const bool is_ahead = call.stages == 2;
  wait_for_inputs();
  let_next_start();
  if (is_ahead) load(blockIdx.x, 0);
  unsigned turn = 0;
  for (unsigned row = blockIdx.x; row < call.rows; row += gridDim.x, ++turn) {
    const unsigned stage = is_ahead ? turn % 2 : 0;
    if (is_ahead) {
      load(row + gridDim.x, 1 - stage);
      asm volatile("cp.async.wait_group 1;" ::: "memory");
    } else {
      load(row, 0);
      asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
    Vector* values = (Vector*)memory + stage * vectors;
    if (call.residual.data != nullptr) add_residual<16>(call, row, values, values);
    norm_row<16>(call, values, row, scratch[turn % 2]);
  }
}

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
// adds up; of a single block it is the result. Without kSums norm_partial does that.
template <int kBytes, int kVectors, bool kIsLayer, bool kSums = true>
__device__ void backward(const NormCall& call) {
  constexpr int kWidth = kBytes / sizeof(Bits);
  constexpr int kStages = kSums ? 3 : 1;
  constexpr bool kKeeps = kVectors * kWidth <= kMostKept;
  constexpr int kKept = kKeeps ? kVectors : 1;
  using Vector = Piece<Type, kWidth>;
  using Pipe = Pipeline<kBytes, kVectors, kStages>;
  extern __shared__ uint4 memory[];
  __shared__ float scratch[2][2][32];
  const unsigned group = call.group, thread = threadIdx.x % group;
  const unsigned groups = blockDim.x / group, vectors = call.columns / kWidth;
  const Pipe pipe{2, group, call.row_bytes};
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
    const auto read = [&](int v, int kept) {
      pipe.piece(stage, 0, v, row_of(call.input, row)).read(normed[kept]);
      pipe.piece(stage, 1, v, row_of(call.grad_out, row)).read(slopes[kept]);
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
  asm volatile("cp.async.wait_all;" ::: "memory");
  if constexpr (kSums) write_sums<kVectors, kWidth>(call, true, grad_weight, (float*)memory);
  if constexpr (kSums && kIsLayer) {
    write_sums<kVectors, kWidth>(call, false, grad_bias, (float*)memory);
  }
}

// The gradient of rows of any size, a block each, read twice.
template <int kBytes>
__device__ void backward_any(const NormCall& call) {
  using Row = AnyRow<kBytes>;
  using Vector = typename Row::Vector;
  constexpr int kWidth = Row::kWidth;
  __shared__ float scratch[2][32];
  const unsigned row = blockIdx.x, vectors = call.columns / kWidth;
  wait_for_inputs();
  const auto* input = (const Vector*)row_of(call.input, row);
  const auto* grad_out = (const Vector*)row_of(call.grad_out, row);
  const auto* more =
      call.grad_sum.data == nullptr ? nullptr : (const Vector*)row_of(call.grad_sum, row);
  const Parameter factor = factor_of(call);
  const float rstd = call.rstd[row], mean = call.is_layer ? call.mean[row] : 0;
  float sums[2] = {};
  Row::each(input, vectors, [&](const float(&x)[kWidth], unsigned at) {
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
  Row::each(input, vectors, [&](const float(&x)[kWidth], unsigned at) {
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

// The sums over rows where backward() does not keep them: of a piece of the columns a lane, and of
// every gridDim.y-th stretch of the rows a block.
template <int kBytes>
__device__ void partial(const NormCall& call) {
  constexpr int kWidth = kBytes / sizeof(Bits);
  constexpr int kWarps = 16;
  using Vector = Piece<Type, kWidth>;
  __shared__ float shared[kWarps][kWidth][32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned at = blockIdx.x * 32 + lane;
  float sums[2][kWidth] = {};
  wait_for_inputs();
  if (at < call.columns / kWidth) {
#pragma unroll 4
    for (unsigned row = blockIdx.y * kWarps + warp; row < call.rows; row += gridDim.y * kWarps) {
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
      const unsigned column = blockIdx.x * 32 * kWidth + i;
      float sum = 0;
      for (int other = 0; other < kWarps; ++other) sum += shared[other][i % kWidth][i / kWidth];
      if (column >= call.columns) continue;
      call.partial[((long long)kind * gridDim.y + blockIdx.y) * call.columns + column] = sum;
    }
    __syncthreads();
  }
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

// By the bytes of a piece, or n for those of one number, and the number of pieces a thread.
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

#ifdef KERNEL_BACKWARD
NORM(backward, 16, 1, 256, 3)
NORM(backward, 16, 2, 512, 1)
NORM(backward, 16, 4, 512, 1)
NORM(backward, 8, 1, 256, 3)
NORM(backward, 8, 4, 512, 1)
NORM(backward, n, 2, 256, 3)
NORM(backward, n, 8, 512, 2)
NORM_ANY(backward_wide_rms, 512, backward<16, 8, false, false>)
NORM_ANY(backward_wide_layer, 512, backward<16, 8, true, false>)
NORM_ANY(backward_any_16, 1024, backward_any<16>)
NORM_ANY(backward_any_n, 512, backward_any<n>)
NORM_ANY(partial_16, 512, partial<16>)
NORM_ANY(partial_n, 512, partial<n>)
NORM_ANY(columns, 1024, columns)
#else
NORM(forward, 16, 1, 256, 4)
NORM(forward, 16, 2, 512, 1)
NORM(forward, 16, 4, 512, 1)
NORM(forward, 8, 1, 256, 4)
NORM(forward, 8, 4, 512, 1)
NORM(forward, n, 2, 256, 4)
NORM(forward, n, 8, 512, 2)
NORM_ANY(forward_wide, 1024, forward_wide)
NORM_ANY(forward_any, 1024, forward_any)
#endif
