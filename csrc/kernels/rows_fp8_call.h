// What the kernels of rows_fp8.cu are called with: one header for both sides.
#pragma once

#include "kernels/norm_rows_call.h"

// What is rounded: the input, its norm, or an activation of it times `other`.
enum class RowsFp8Kind : int { kPlain, kNorm, kSilu, kGelu, kGeluTanh };

struct RowsFp8Call {
  NormRows input, other;  // other of a norm: a residual; data null: absent
  const void* weight;     // of the norm; null: ones
  void *out, *sum;        // dense; sum: of input and residual, or null
  const float* scale;     // null: each row has its own, by its largest magnitude
  float* descale;         // of each row, or one
  unsigned* amax;         // likewise, as bits
  unsigned rows, columns;
  RowsFp8Kind kind;
  float eps;
  bool zero_centered, is_weight_float, is_e5m2;
};
