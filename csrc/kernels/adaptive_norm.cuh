// What the kernels of adaptive norms share: the numbers that a sample's rows are modulated by, and
// their gradients, sums over these rows.
//
// The backward's rows are shared out to workers, `stretch` of them to each, wherever samples begin:
// so all have the same work. What a worker sums up of a sample is the result where the sample is
// its alone. Else it is a part of it, one of two of the worker's: the first of a sample that begins
// before its rows, the second of one that begins among them and goes on behind.
#pragma once

#include "adaptive_norm_call.h"
#include "column_sums.cuh"
#include "norm_rows.cuh"

// A row of gate, scale or shift.
__device__ Parameter modulation_of(const NormRows& rows, bool is_float, unsigned sample,
                                   float otherwise, float shift) {
  const long long offset = rows.data == nullptr ? 0 : offset_of(rows, sample);
  const void* data = rows.data;
  if (data != nullptr) {
    data = is_float ? (const void*)((const float*)data + offset)
                    : (const void*)((const Bits*)data + offset);
  }
  return {data, is_float, otherwise, shift};
}

__device__ Parameter gate_of(const AdaptiveNormCall& call, unsigned sample) {
  return modulation_of(call.gate, call.is_gate_float, sample, 1, 0);
}

// 1 + scale.
__device__ Parameter factor_of(const AdaptiveNormCall& call, unsigned sample) {
  return modulation_of(call.scale, call.is_scale_float, sample, 1, 1);
}

__device__ Parameter shift_of(const AdaptiveNormCall& call, unsigned sample) {
  return modulation_of(call.shift, call.is_shift_float, sample, 0, 0);
}

__device__ Parameter weight_of(const AdaptiveNormCall& call) {
  return {call.weight, call.is_weight_float, 1, 0};
}

__device__ Parameter bias_of(const AdaptiveNormCall& call) {
  return {call.bias, call.is_bias_float, 0, 0};
}

template <int kWidth>
__device__ void multiply_by_weight(const AdaptiveNormCall& call, unsigned at,
                                   float (&factors)[kWidth]) {
  if (call.weight == nullptr) return;
  float weights[kWidth];
  weight_of(call).read(at, weights);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) factors[k] *= weights[k];
}

// What the normed numbers of a sample are multiplied by in all.
template <int kWidth>
__device__ void read_factors(const AdaptiveNormCall& call, unsigned sample, unsigned at,
                             float (&factors)[kWidth]) {
  factor_of(call, sample).read(at, factors);
  multiply_by_weight(call, at, factors);
}

// Writes numbers as those of the piece `at`, of a row if `row` is one of several.
template <int kWidth>
__device__ void write_piece(void* to, bool is_float, const AdaptiveNormCall& call, unsigned row,
                            unsigned at, const float (&values)[kWidth]) {
  if (to == nullptr) return;
  const long long offset = (long long)row * call.columns + at * kWidth;
  if (is_float) {
    constexpr int kPart = kWidth < 4 ? kWidth : 4;
#pragma unroll
    for (int k = 0; k < kWidth; k += kPart) {
      float part[kPart];
#pragma unroll
      for (int i = 0; i < kPart; ++i) part[i] = values[k + i];
      *(Piece<Float, kPart>*)((float*)to + offset + k) = Piece<Float, kPart>::of(part);
    }
  } else {
    *(Piece<Type, kWidth>*)((Bits*)to + offset) = Piece<Type, kWidth>::of(values);
  }
}

constexpr int kMostWarps = 16;  // of a row

// Before the first sum_up_both().
template <int kCount>
__device__ void clear(float (&scratch)[kCount][kMostWarps]) {
  for (unsigned i = threadIdx.x; i < kCount * kMostWarps; i += blockDim.x) {
    scratch[i / kMostWarps][i % kMostWarps] = 0;
  }
  __syncthreads();
}
template <int kCount>
__device__ void clear(float (&scratch)[kCount][2][kMostWarps]) {
  for (auto& one : scratch) clear(one);
}

// Two sums at once, as sum_up() gives them, by fewer instructions: first half of the threads goes
// on with one and half with the other, and no warp adds up by lanes what the warps have. What
// `scratch` has of warps that are not there is zero.
__device__ void sum_up_both(float (&sums)[2], unsigned group, float (*scratch)[kMostWarps]) {
  if (group == 1) return;
  const unsigned half = min(group, 32u) / 2;
  const bool is_second = (threadIdx.x & half) != 0;
  float sum = is_second ? sums[1] : sums[0];
  sum += __shfl_xor_sync(~0u, is_second ? sums[0] : sums[1], half);
  if (half == 16) {
#pragma unroll
    for (unsigned distance = 8; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(~0u, sum, distance);
    }
  } else {
    sum = sum_within_warp(sum, half);
  }
  if (group <= 32) {
    const float other = __shfl_xor_sync(~0u, sum, half);
    sums[0] = is_second ? other : sum;
    sums[1] = is_second ? sum : other;
    return;
  }
  if (threadIdx.x % 16 == 0) scratch[is_second][threadIdx.x / 32] = sum;
  __syncthreads();
  sums[0] = sums[1] = 0;
  for (unsigned warp = 0; warp < group / 32; warp += 4) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float parts[4];
      ((const Piece<Float, 4>*)scratch[i])[warp / 4].read(parts);
      sums[i] += (parts[0] + parts[1]) + (parts[2] + parts[3]);
    }
  }
}

// What the normed numbers of a sample are multiplied by, in a thread's columns: in registers, or
// where that would leave a multiprocessor fewer threads in shared memory.
template <int kVectors, int kWidth>
class Factors {
 public:
  __device__ explicit Factors(void* memory) : shared_((Part*)memory) {
  }
  __device__ void keep(int v, const float (&values)[kWidth]) {
#pragma unroll
    for (int k = 0; k < kWidth; k += kPart) {
      if constexpr (kIsShared) {
        float part[kPart];
#pragma unroll
        for (int i = 0; i < kPart; ++i) part[i] = values[k + i];
        *place(v, k) = Part::of(part);
      } else {
#pragma unroll
        for (int i = 0; i < kPart; ++i) own_[v][k + i] = values[k + i];
      }
    }
  }
  __device__ void read(int v, float (&values)[kWidth]) const {
#pragma unroll
    for (int k = 0; k < kWidth; k += kPart) {
      if constexpr (kIsShared) {
        float part[kPart];
        place(v, k)->read(part);
#pragma unroll
        for (int i = 0; i < kPart; ++i) values[k + i] = part[i];
      } else {
#pragma unroll
        for (int i = 0; i < kPart; ++i) values[k + i] = own_[v][k + i];
      }
    }
  }

 private:
  static constexpr bool kIsShared = kVectors * kWidth > kAdaptiveNormKept;
  static constexpr int kPart = kWidth < 4 ? kWidth : 4;
  using Part = Piece<Float, kPart>;

  __device__ Part* place(int v, int k) const {
    return shared_ + (v * kWidth + k) / kPart * blockDim.x + threadIdx.x;
  }

  Part* shared_;
  float own_[kIsShared ? 1 : kVectors][kWidth];
};

// Sums over rows of a sample, in the columns of a piece: of the output's gradient times the normed
// input, of that gradient alone, and where there is a gate of the sum's gradient times the update.
template <int kSums, int kWidth>
using Sums = float[kSums][kWidth];

// The gradients of a sample's gate, scale and shift.
template <int kSums, int kWidth>
__device__ void write_gradients(const AdaptiveNormCall& call, unsigned sample, unsigned at,
                                const Sums<kSums, kWidth>& sums) {
  if constexpr (kSums > 2) {
    write_piece(call.grad_gate, call.is_grad_gate_float, call, sample, at, sums[2]);
  }
  write_piece(call.grad_shift, call.is_grad_shift_float, call, sample, at, sums[1]);
  if (call.grad_scale == nullptr) return;
  float weights[kWidth], biases[kWidth];
  weight_of(call).read(at, weights);
  bias_of(call).read(at, biases);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) weights[k] = weights[k] * sums[0][k] + biases[k] * sums[1][k];
  write_piece(call.grad_scale, call.is_grad_scale_float, call, sample, at, weights);
}

__device__ float* partial_of(const AdaptiveNormCall& call, unsigned worker, bool is_second,
                             int kinds, int kind) {
  return call.partial + ((2ll * worker + is_second) * kinds + kind) * call.columns;
}

// What a worker has summed up of a sample. To the sums of weight and bias each sample adds its own:
// they are the worker's in memory, for few samples end where a worker has no registers left.
template <int kSums, int kWidth>
__device__ void keep_sums(const AdaptiveNormCall& call, unsigned worker, unsigned sample,
                          unsigned at, const Sums<kSums, kWidth>& sums) {
  const unsigned first = worker * call.stretch, end = min(first + call.stretch, call.rows);
  if (call.parameter != nullptr) {
    const bool is_first = first / call.tokens == sample;
    float factors[kWidth];
    factor_of(call, sample).read(at, factors);
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) {
      const unsigned row = kind * call.workers + worker;
      const long long offset = (long long)row * call.columns + at * kWidth;
      float values[kWidth] = {};
      if (!is_first) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) values[k] = call.parameter[offset + k];
      }
#pragma unroll
      for (int k = 0; k < kWidth; ++k) values[k] += factors[k] * sums[kind][k];
      write_piece(call.parameter, true, call, row, at, values);
    }
  }
  const unsigned from = sample * call.tokens;
  const bool begins = from >= first;
  if (begins && from + call.tokens <= end) {
    return write_gradients<kSums, kWidth>(call, sample, at, sums);
  }
  if (call.partial == nullptr) return;
#pragma unroll
  for (int kind = 0; kind < kSums; ++kind) {
    write_piece(partial_of(call, worker, begins, kSums, kind), true, call, 0, at, sums[kind]);
  }
}

// The end: adds up the parts of a sample's sums, or those of weight or bias, for some columns a
// block. Blocks of samples come first, where there are parts, as many for each as it has columns:
// of each column `split` threads, of warps side by side.
template <int kSums>
__device__ void totals(const AdaptiveNormCall& call) {
  constexpr unsigned kThreads = kAdaptiveNormTotalsThreads;
  __shared__ float by_thread[kSums][kThreads];
  const unsigned split = call.split, columns = kThreads / split;
  const unsigned strips = (call.columns + columns - 1) / columns;
  const unsigned sample = blockIdx.x / strips;
  const unsigned samples = call.partial == nullptr ? 0 : call.rows / call.tokens;
  wait_for_inputs();  // also where there is nothing to do: the next kernel waits for this one alone
  if (sample >= samples) {
    const unsigned narrow = (call.columns + 31) / 32, block = blockIdx.x - samples * strips;
    const unsigned kind = block / narrow;
    void* to = kind == 0 ? call.grad_weight : call.grad_bias;
    if (to == nullptr) return;
    const bool is_float = kind == 0 ? call.is_weight_float : call.is_bias_float;
    const float* sums = call.parameter + (long long)kind * call.workers * call.columns;
    return add_up_columns(
        sums, call.workers, call.columns,
        [&](unsigned column, float sum) {
          const float value[1] = {sum};
          write_piece(to, is_float, call, 0, column, value);
        },
        block % narrow);
  }
  const unsigned first = sample * call.tokens / call.stretch;
  const unsigned last = (sample * call.tokens + call.tokens - 1) / call.stretch;
  if (first == last) return;  // its worker has written them
  const unsigned warp = threadIdx.x / 32;
  const unsigned at = blockIdx.x % strips * columns + warp / split * 32 + threadIdx.x % 32;
  float sums[kSums][1] = {};
  if (at < call.columns) {
    constexpr unsigned kAhead = 8;  // that memory is asked for at once, of each kind
    for (unsigned from = first + warp % split; from <= last; from += kAhead * split) {
      float numbers[kAhead][kSums] = {};
#pragma unroll
      for (unsigned i = 0; i < kAhead; ++i) {
        const unsigned worker = from + i * split;
        if (worker > last) continue;
        // The sample begins in the first worker's rows, be it at the beginning.
        const float* parts = partial_of(call, worker, worker == first, kSums, 0) + at;
#pragma unroll
        for (int kind = 0; kind < kSums; ++kind) numbers[i][kind] = parts[kind * call.columns];
      }
#pragma unroll
      for (unsigned i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int kind = 0; kind < kSums; ++kind) sums[kind][0] += numbers[i][kind];
      }
    }
  }
  if (split > 1) {
#pragma unroll
    for (int kind = 0; kind < kSums; ++kind) by_thread[kind][threadIdx.x] = sums[kind][0];
    __syncthreads();
    if (warp % split != 0) return;
#pragma unroll
    for (int kind = 0; kind < kSums; ++kind) {
      for (unsigned other = 1; other < split; ++other) {
        sums[kind][0] += by_thread[kind][threadIdx.x + 32 * other];
      }
    }
  }
  if (at < call.columns) write_gradients<kSums, 1>(call, sample, at, sums);
}
