// The gradients of adaptive norms whose samples are single rows: there is nothing to add up over
// rows, so that blocks come and go with theirs, as those of norm_forward.cu do.
#pragma once

#include "adaptive_norm.cuh"
#include "adaptive_norm_numbers.cuh"
#include "row_pipeline.cuh"

// Whether numbers of the rows' own type are there, which can be copied as the rows are.
__device__ bool is_like_rows(const Parameter& parameter) {
  return parameter.data != nullptr && (sizeof(Bits) == sizeof(float) || !parameter.is_float);
}

// All that a row needs comes to shared memory: it is on its way before any of it is waited for, and
// takes no registers, so that a multiprocessor has room for more rows. A thread has kVectors
// pieces.
template <int kVectors, bool kIsGated>
__device__ void backward_single(const AdaptiveNormCall& call) {
  constexpr int kWidth = 16 / sizeof(Bits);
  enum { kInput, kGrad, kFactors, kUpdate, kGates, kMore, kAll };
  using Vector = Piece<Type, kWidth>;
  using Pipe = Pipeline<16, kVectors, 1, kIsGated ? kAll : kUpdate>;
  alignas(16) __shared__ float scratch[2][kMostWarps];
  const unsigned group = call.group, thread = threadIdx.x % group;
  const unsigned row = blockIdx.x * (blockDim.x / group) + threadIdx.x / group;
  const bool is_row = row < call.rows;
  const unsigned vectors = is_row ? call.columns / kWidth : 0;
  const bool has_more = call.grad_sum.data != nullptr;
  const bool has_factors = is_like_rows(factor_of(call, row));
  const bool has_gates = is_like_rows(gate_of(call, row));
  const Pipe pipe{group, 0};
  wait_for_inputs();
  let_next_start();
  pipe.load(0, kInput, row_of(call.input, row), vectors);
  pipe.load(0, kGrad, row_of(call.grad_out, row), vectors);
  if (has_factors) pipe.load(0, kFactors, (const Bits*)factor_of(call, row).data, vectors);
  if constexpr (kIsGated) {
    pipe.load(0, kUpdate, row_of(call.update, row), vectors);
    if (has_gates) pipe.load(0, kGates, (const Bits*)gate_of(call, row).data, vectors);
    if (has_more) pipe.load(0, kMore, row_of(call.grad_sum, row), vectors);
  }
  Pipe::commit();
  const float rstd = is_row ? call.rstd[row] : 0;
  const float mean = is_row && call.is_layer ? call.mean[row] : 0;
  clear(scratch);
  pipe.wait();
  const auto read = [&](int v, unsigned tensor, float (&values)[kWidth]) {
    pipe.pieces(0, tensor, nullptr)[v].read(values);
  };
  const auto read_own = [&](int v, unsigned at, float (&factors)[kWidth]) {
    if (has_factors) {
      read(v, kFactors, factors);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) factors[k] += 1;
    } else {
      factor_of(call, row).read(at, factors);
    }
    multiply_by_weight(call, at, factors);
  };
  float of_row[2] = {};
#pragma unroll 1
  for (int v = 0; v < kVectors; ++v) {
    const unsigned at = thread + v * group;
    if (at >= vectors) continue;
    float normed[kWidth], factors[kWidth];
    Sums<2, kWidth> own;
    read(v, kInput, normed);
    read(v, kGrad, own[1]);
    read_own(v, at, factors);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      normed[k] = (normed[k] - mean) * rstd;
      own[0][k] = own[1][k] * normed[k];
      of_row[0] += own[0][k] * factors[k];
      of_row[1] += own[1][k] * factors[k];
    }
    write_gradients<2, kWidth>(call, row, at, own);
  }
  sum_up_both(of_row, group, scratch);
  const float along = -of_row[0] / call.columns * rstd * rstd;
  const float shift = call.is_layer ? -of_row[1] / call.columns * rstd : 0;
  const long long dense = (long long)row * vectors;
#pragma unroll 1
  for (int v = 0; v < kVectors; ++v) {
    const unsigned at = thread + v * group;
    if (at >= vectors) continue;
    float result[kWidth], slopes[kWidth], others[kWidth];
    read(v, kInput, result);
    read(v, kGrad, slopes);
    read_own(v, at, others);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      result[k] = (result[k] - mean) * along + shift + slopes[k] * others[k] * rstd;
    }
    if (has_more) {
      if constexpr (kIsGated) {
        read(v, kMore, others);
      } else {
        ((const Vector*)row_of(call.grad_sum, row))[at].read(others);
      }
#pragma unroll
      for (int k = 0; k < kWidth; ++k) result[k] += others[k];
    }
    if (call.out != nullptr) ((Vector*)call.out)[dense + at] = Vector::of(result);
    if constexpr (kIsGated) {
      read(v, kUpdate, others);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) others[k] *= result[k];
      write_piece(call.grad_gate, call.is_grad_gate_float, call, row, at, others);
      if (call.grad_update == nullptr) continue;
      if (has_gates) {
        read(v, kGates, others);
      } else {
        gate_of(call, row).read(at, others);
      }
#pragma unroll
      for (int k = 0; k < kWidth; ++k) result[k] *= others[k];
      ((Vector*)call.grad_update)[dense + at] = Vector::of(result);
    }
  }
}

// Of rows that no pieces of 16 bytes fit, in registers: a block's warps share one.
template <bool kIsGated>
__device__ void backward_single_odd(const AdaptiveNormCall& call) {
  constexpr int kNumbers = kAdaptiveNormSingle;
  alignas(16) __shared__ float scratch[2][kMostWarps];
  const unsigned row = blockIdx.x;
  const bool has_more = call.grad_sum.data != nullptr;
  const Numbers<kNumbers, 32> own(blockDim.x, call.columns);
  const long long dense = (long long)row * call.columns + own.start;
  clear(scratch);
  wait_for_inputs();
  let_next_start();
  unsigned inputs[kNumbers], grads[kNumbers], updates[kNumbers], more[kNumbers];
  unsigned gate_bits[kNumbers], factor_bits[kNumbers];
  const Parameter factor = factor_of(call, row), gate = gate_of(call, row);
  own.load(row_of(call.input, row), inputs);
  own.load(row_of(call.grad_out, row), grads);
  if (has_more) own.load(row_of(call.grad_sum, row), more);
  if constexpr (kIsGated) {
    own.load(row_of(call.update, row), updates);
    own.template load<false>(gate, gate_bits);
  }
  own.template load<false>(factor, factor_bits);
  all_are_asked_for(inputs);
  all_are_asked_for(grads);
  all_are_asked_for(factor_bits);
  float slopes[kNumbers], gates[kNumbers];
  own.template read<false>(factor, factor_bits, slopes);
  if constexpr (kIsGated) own.template read<false>(gate, gate_bits, gates);
  const float rstd = call.rstd[row], mean = call.is_layer ? call.mean[row] : 0;
  float of_row[2] = {};
  own.each([&](int i, unsigned further) {
    const unsigned at = own.start + further;
    const float normed = (number_of(inputs[i]) - mean) * rstd;
    const float grad = number_of(grads[i]);
    float factor[1] = {slopes[i]};
    multiply_by_weight(call, at, factor);
    slopes[i] = grad * factor[0];
    of_row[0] += slopes[i] * normed;
    of_row[1] += slopes[i];
    const Sums<2, 1> sums = {{grad * normed}, {grad}};
    write_gradients<2, 1>(call, row, at, sums);
  });
  sum_up_both(of_row, blockDim.x, scratch);
  const float along = -of_row[0] / call.columns * rstd * rstd;
  const float shift = call.is_layer ? -of_row[1] / call.columns * rstd : 0;
  own.each([&](int i, unsigned further) {
    float result = (number_of(inputs[i]) - mean) * along + shift;
    // Of a row of one number nothing is left if this is rounded as `shift` was, and not fused.
    result += __fmul_rn(slopes[i], rstd);
    if (has_more) result += number_of(more[i]);
    if (call.out != nullptr) ((Bits*)call.out + dense)[further] = Type::write(result);
    if constexpr (kIsGated) {
      const float product[1] = {result * number_of(updates[i])};
      write_piece(call.grad_gate, call.is_grad_gate_float, call, row, own.start + further, product);
      if (call.grad_update != nullptr) {
        ((Bits*)call.grad_update + dense)[further] = Type::write(result * gates[i]);
      }
    }
  });
}
