// The gradients of adaptive norms of rows that no pieces of 16 bytes fit: of an odd size, or at
// addresses of any kind.
//
// Rows come to shared memory by all the 16 bytes that they lie in, and from there a number at a
// time. A block of several groups, each of the threads that share a row, is one worker
// (adaptive_norm.cuh): its groups take turns at its rows, and add up their sums where a sample ends
// or the worker's rows do. So memory sees the sums of a block, and not those of each group, and
// what columns are multiplied by is there once for the block.
#pragma once

#include "adaptive_norm.cuh"
#include "row_pipeline.cuh"

constexpr int kTogether = kAdaptiveNormTogether;

// A thread's columns, kNumbers at most, of which it goes through kTogether at once. A warp has the
// columns of these beside one another, and the warps of a row take turns.
template <int kNumbers>
struct OddColumns {
  unsigned group, count, step, first, start;

  __device__ explicit OddColumns(const AdaptiveNormCall& call)
      : group(call.group), count(call.columns), step(kNumbers < 32 ? group : 32) {
    const unsigned thread = threadIdx.x % group;
    first = thread / step * (kTogether * step);
    start = first + thread % step;
  }
  // Calls `visit` with the index of the first of those at once, and its column; the others are
  // `step` further each. Some of them may lie behind the row's end.
  template <class Visit>
  __device__ void each(const Visit& visit) const {
    unsigned stride = group;
    asm volatile("" : "+r"(stride));  // places are not kept from row to row, for want of registers
#pragma unroll
    for (int i = 0; i < kNumbers; i += kTogether) {
      if (first + i * stride >= count) break;
      visit(i, start + i * stride);
    }
  }
  template <class Number = Type>
  __device__ void read(const typename Number::Bits* row, unsigned at,
                       float (&values)[kTogether]) const {
#pragma unroll
    for (int k = 0; k < kTogether; ++k) values[k] = Number::read((row + at)[k * step]);
  }
  // kIsAll: what is behind the row's end too, as in read().
  template <bool kIsAll>
  __device__ void read_some(const Bits* row, unsigned at, float (&values)[kTogether]) const {
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (kIsAll || at + k * step < count) values[k] = Type::read((row + at)[k * step]);
    }
  }
  // As many as there are, unless `to` is null.
  __device__ void write(void* to, long long first_of_row, unsigned at,
                        const float (&values)[kTogether]) const {
    const unsigned end = to == nullptr ? 0 : count;
    Bits* own = (Bits*)to + first_of_row + at;
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (at + k * step < end) own[k * step] = Type::write(values[k]);
    }
  }
};

// The rows on their way, of each of kTensors one for each group and stage.
template <int kStages, int kTensors>
struct OddRows {
  unsigned char* memory;
  unsigned group, row_bytes;  // AdaptiveNormCall's

  __device__ unsigned char* place(unsigned stage, unsigned tensor) const {
    const unsigned groups = blockDim.x / group;
    return memory + ((stage * kTensors + tensor) * groups + threadIdx.x / group) * row_bytes;
  }
  __device__ void load(unsigned stage, unsigned tensor, const NormRows& rows, unsigned row,
                       unsigned columns) const {
    const unsigned bytes = columns * sizeof(Bits);
    const unsigned thread = threadIdx.x % group;
    copy_whole(place(stage, tensor), row_of(rows, row), bytes, row_bytes, thread, group);
  }
  // The numbers of `row`, once it has arrived; behind its end they are zero.
  __device__ const Bits* numbers(unsigned stage, unsigned tensor, const NormRows& rows,
                                 unsigned row) const {
    return (const Bits*)(place(stage, tensor) + (unsigned long long)row_of(rows, row) % 16);
  }
};

// Adds up what the groups of a block have of a sample, and keeps it.
template <int kSums, int kNumbers>
__device__ void keep_sums_of_groups(const AdaptiveNormCall& call, unsigned sample, unsigned room,
                                    const OddColumns<kNumbers>& columns,
                                    const Sums<kSums, kNumbers>& sums, float* memory) {
  const unsigned groups = blockDim.x / call.group;
  __syncthreads();  // all have done with the rows that were there
#pragma unroll
  for (int kind = 0; kind < kSums; ++kind) {
    float* own = memory + (kind * groups + threadIdx.x / call.group) * room;
    columns.each([&](int i, unsigned at) {
#pragma unroll
      for (int k = 0; k < kTogether; ++k) (own + at)[k * columns.step] = sums[kind][i + k];
    });
  }
  __syncthreads();
  for (unsigned at = threadIdx.x; at < call.columns; at += blockDim.x) {
    Sums<kSums, 1> total = {};
#pragma unroll 4
    for (unsigned other = 0; other < groups; ++other) {
#pragma unroll
      for (int kind = 0; kind < kSums; ++kind) {
        total[kind][0] += memory[(kind * groups + other) * room + at];
      }
    }
    keep_sums<kSums, 1>(call, blockIdx.x, sample, at, total);
  }
  __syncthreads();
}

// A row that has arrived. Without a gate there is no update, and the sum's gradient is where it
// lies.
struct OddRow {
  const Bits *inputs, *grads, *updates, *grad_sum;  // the last null: there is none
  float mean, rstd;
};

// Adds a row to the sums but the gate's; what its gradient needs is added to `of_row`.
template <int kSums, int kNumbers>
__device__ void add_row(const OddRow& row, const float* factors,
                        const OddColumns<kNumbers>& columns, Sums<kSums, kNumbers>& sums,
                        float (&of_row)[2]) {
  columns.each([&](int i, unsigned at) {
    float normed[kTogether], slopes[kTogether], own[kTogether];
    columns.read(row.inputs, at, normed);
    columns.read(row.grads, at, slopes);
    columns.template read<Float>(factors, at, own);
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      // Behind the row's end slopes are zero, but what is zero less a mean may become infinite.
      const bool is_there = at + k * columns.step < columns.count;
      normed[k] = is_there ? (normed[k] - row.mean) * row.rstd : 0;
      sums[0][i + k] += slopes[k] * normed[k];
      sums[1][i + k] += slopes[k];
      slopes[k] *= own[k];
      of_row[0] += slopes[k] * normed[k];
      of_row[1] += slopes[k];
    }
  });
}

// Writes a row's gradients: `along` times the input less its mean, `shift`, and the slope. Adds to
// the gate's sum.
template <bool kIsGated, int kSums, int kNumbers>
__device__ void write_row(const AdaptiveNormCall& call, unsigned index, const OddRow& row,
                          float along, float shift, const float* factors, const float* gates,
                          const OddColumns<kNumbers>& columns, Sums<kSums, kNumbers>& sums) {
  const long long dense = (long long)index * columns.count;
  columns.each([&](int i, unsigned at) {
    float result[kTogether], slopes[kTogether], own[kTogether], more[kTogether] = {};
    columns.read(row.inputs, at, result);
    columns.read(row.grads, at, slopes);
    columns.template read<Float>(factors, at, own);
    if (row.grad_sum != nullptr) columns.template read_some<kIsGated>(row.grad_sum, at, more);
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      result[k] = (result[k] - row.mean) * along + shift;
      // Of a row of one number nothing is left if this is rounded as `shift` was, and not fused.
      result[k] += __fmul_rn(slopes[k] * own[k], row.rstd);
      result[k] += more[k];
    }
    columns.write(call.out, dense, at, result);
    if constexpr (kIsGated) {
      float updates[kTogether];
      columns.read(row.updates, at, updates);
      columns.template read<Float>(gates, at, own);
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        sums[2][i + k] += result[k] * updates[k];
        result[k] *= own[k];
      }
      columns.write(call.grad_update, dense, at, result);
    }
  });
}

// What a sample's columns are multiplied by, for all groups; behind the row's end it is zero.
__device__ void keep_factors(const AdaptiveNormCall& call, unsigned sample, unsigned room,
                             float* factors, float* gates) {
  for (unsigned at = threadIdx.x; at < room; at += blockDim.x) {
    float factor[1] = {0}, gate[1] = {0};
    if (at < call.columns) {
      read_factors(call, sample, at, factor);
      if (gates != nullptr) gate_of(call, sample).read(at, gate);
    }
    factors[at] = factor[0];
    if (gates != nullptr) gates[at] = gate[0];
  }
  __syncthreads();
}

// kNumbers of a row a thread.
template <int kNumbers, int kStages, bool kIsGated>
__device__ void backward_odd(const AdaptiveNormCall& call) {
  constexpr int kSums = kIsGated ? 3 : 2, kTensors = kIsGated ? 4 : 2;
  extern __shared__ uint4 memory[];
  alignas(16) __shared__ float scratch[2][2][kMostWarps];
  const unsigned group = call.group, groups = blockDim.x / group;
  const unsigned room = (call.row_bytes - 16) / sizeof(Bits);
  float *factors = (float*)memory, *gates = kIsGated ? factors + room : nullptr;
  float* behind = (kIsGated ? gates : factors) + room;
  const OddRows<kStages, kTensors> rows{(unsigned char*)behind, group, call.row_bytes};
  const OddColumns<kNumbers> columns(call);
  const float per_column = 1.0f / call.columns;
  const bool has_more = call.grad_sum.data != nullptr;
  clear(scratch);
  wait_for_inputs();
  let_next_start();
  const unsigned begin = blockIdx.x * call.stretch, end = min(begin + call.stretch, call.rows);
  for (unsigned first = begin; first < end;) {
    const unsigned sample = first / call.tokens, stop = min((sample + 1) * call.tokens, end);
    const auto load = [&](unsigned row, unsigned stage) {
      if (row < stop) {
        rows.load(stage, 0, call.input, row, call.columns);
        rows.load(stage, 1, call.grad_out, row, call.columns);
        if constexpr (kIsGated) {
          rows.load(stage, 2, call.update, row, call.columns);
          if (has_more) rows.load(stage, 3, call.grad_sum, row, call.columns);
        }
      }
      commit_copies();
    };
    unsigned index = first + threadIdx.x / group;
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) load(index + stage * groups, stage);
    float next_rstd = 0, next_mean = 0;  // asked for a turn ahead, as the rows are
    const auto load_moments = [&](unsigned row) {
      if (row >= stop) return;
      next_rstd = call.rstd[row];
      if (call.is_layer) next_mean = call.mean[row];
    };
    load_moments(index);
    keep_factors(call, sample, room, factors, gates);
    Sums<kSums, kNumbers> sums = {};
    unsigned stage = 0, freed = kStages - 1;
    for (unsigned turn = 0; first + turn * groups < stop; ++turn, index += groups) {
      wait_for_all_but<kStages - 2>();
      // The row is there for all, and all have done with the one before it.
      if (group > 32) {
        __syncthreads();
      } else {
        __syncwarp();
      }
      load(index + (kStages - 1) * groups, freed);
      const bool is_row = index < stop;
      OddRow row{rows.numbers(stage, 0, call.input, index),
                 rows.numbers(stage, 1, call.grad_out, index),
                 nullptr,
                 nullptr,
                 next_mean,
                 next_rstd};
      if constexpr (kIsGated) row.updates = rows.numbers(stage, 2, call.update, index);
      if (has_more) {
        row.grad_sum =
            kIsGated ? rows.numbers(stage, 3, call.grad_sum, index) : row_of(call.grad_sum, index);
      }
      load_moments(index + groups);
      float of_row[2] = {};
      if (is_row) add_row<kSums>(row, factors, columns, sums, of_row);
      sum_up_both(of_row, group, scratch[turn % 2]);
      const float along = -of_row[0] * per_column * row.rstd * row.rstd;
      const float shift = call.is_layer ? -of_row[1] * per_column * row.rstd : 0;
      if (is_row) {
        write_row<kIsGated, kSums>(call, index, row, along, shift, factors, gates, columns, sums);
      }
      freed = stage;
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    keep_sums_of_groups<kSums>(call, sample, room, columns, sums, behind);
    first = stop;
  }
}
