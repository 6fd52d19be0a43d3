// What the kernels of conv_epilogue.cu are called with: one header for both sides.
#pragma once

// How many pieces a thread has at most where nothing but the activation is left.
constexpr int kConvEpilogueAhead = 4;

// Rows are pixels, columns channels, which lie densely.
struct ConvEpilogueForwardCall {
  const void *conv, *bias, *residual;  // bias, residual: null where there are none
  void *before, *out;                  // before: null where nobody wants it
  long long rows;
  unsigned columns;
  unsigned pieces;   // of a row, that a block has; 0: only the activation is left, rows are pieces
  bool adds_last;    // the residual, to what the activation gives
  bool keeps_slope;  // `before` is to hold the activation's slope, not its input
};

struct ConvEpilogueCall {
  const void *grad_out, *saved;  // saved: null where the slope is 1
  void* grad;                    // null: only the sums are wanted
  float* partial;                // [partials, columns]; null: no sums are wanted
  void* grad_bias;
  long long rows;
  unsigned columns, partials;
  unsigned pieces;  // of a row, that a block has
};
