// What the kernels of adaptive_norm_forward.cu and adaptive_norm_backward.cu are called with: one
// header for both sides.
#pragma once

#include "kernels/norm_rows_call.h"

// Of the blocks that add up the parts of samples.
constexpr unsigned kAdaptiveNormTotalsThreads = 512;
// Factors of columns that a thread of the backward keeps in registers, beside its sums.
constexpr int kAdaptiveNormKept = 8;
// Columns of a row of any size that a thread of the backward goes through together.
constexpr int kAdaptiveNormTogether = 4;
// Those that it has where the samples are single rows.
constexpr int kAdaptiveNormSingle = 8;

struct AdaptiveNormCall {
  NormRows input, update, grad_out, grad_sum;  // data null: absent
  NormRows gate, scale, shift;                 // a row for each sample; data null: absent
  const void *weight, *bias;                   // null: absent
  void *out, *sum, *grad_update;  // dense; the backward's out: of the input; null: not wanted
  float *mean, *rstd;             // [rows]; the forward writes them unless null
  // The gradients, dense; null: not wanted.
  void *grad_gate, *grad_scale, *grad_shift, *grad_weight, *grad_bias;
  float* partial;    // [workers, 2, sums, columns]: see adaptive_norm.cuh
  float* parameter;  // [weight and bias, workers, columns]; null: neither gradient is wanted
  float* slopes;     // [rows, 2]: see adaptive_norm_any.cuh; null: not wanted
  unsigned rows, columns, tokens;  // `tokens` rows have one gate, scale and shift: a sample's
  unsigned group;      // threads that share a row: the block, or a power of two of one warp's
  unsigned row_bytes;  // that a row takes in shared memory where it is copied whole
  unsigned split;      // the threads that share a column's parts in the end, a power of two
  unsigned stretch, workers;  // the backward's: rows of a worker, and workers for all rows
  float eps;
  bool is_layer;
  bool is_gate_float, is_scale_float, is_shift_float, is_weight_float, is_bias_float;
  bool is_grad_gate_float, is_grad_scale_float, is_grad_shift_float;
};
