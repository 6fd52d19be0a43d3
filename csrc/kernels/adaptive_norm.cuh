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

// What the normed numbers of a sample are multiplied by in all.
template <int kWidth>
__device__ void read_factors(const AdaptiveNormCall& call, unsigned sample, unsigned at,
                             float (&factors)[kWidth]) {
  factor_of(call, sample).read(at, factors);
  if (call.weight == nullptr) return;
  float weights[kWidth];
  weight_of(call).read(at, weights);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) factors[k] *= weights[k];
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

// The end: adds up the parts of a sample's sums, or those of weight or bias, for a strip of 32
// columns a block. Blocks of samples come first, where there are parts, `strips` of them each.
template <int kSums>
__device__ void totals(const AdaptiveNormCall& call) {
  const unsigned strips = (call.columns + 31) / 32, strip = blockIdx.x % strips;
  const unsigned sample = blockIdx.x / strips;
  const unsigned samples = call.partial == nullptr ? 0 : call.rows / call.tokens;
  wait_for_inputs();  // also where there is nothing to do: the next kernel waits for this one alone
  if (sample >= samples) {
    const unsigned kind = sample - samples;
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
        strip);
  }
  const unsigned first = sample * call.tokens / call.stretch;
  const unsigned last = (sample * call.tokens + call.tokens - 1) / call.stretch;
  if (first == last) return;  // its worker has written them
  // The sample begins in the first worker's rows, be it at the beginning.
  float sums[kSums][1];
  unsigned at = 0;
  bool has_column = false;
  for (int kind = 0; kind < kSums; ++kind) {
    if (kind > 0) __syncthreads();
    add_up_rows_at(
        [&](unsigned row) { return partial_of(call, first + row, row == 0, kSums, kind); },
        last - first + 1, call.columns,
        [&](unsigned column, float sum) {
          sums[kind][0] = sum;
          at = column;
          has_column = true;
        },
        strip);
  }
  if (has_column) write_gradients<kSums, 1>(call, sample, at, sums);
}
