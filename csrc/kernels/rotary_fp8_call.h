// What the kernels of rotary_fp8.cu are called with: one header for both sides.
#pragma once

#include "kernels/rotary_call.h"

// The most scales of a call: those of query and key, and one for all of value or one for each head.
constexpr int kMostScales = 1024;
// The most numbers of a head.
constexpr int kMostHeadSize = 256;

// Rows are heads of tokens: those of the query, the key and the value of each token, in this order.
struct RotaryFp8Call {
  RotaryAnyCall turn;  // query and key; `items` is not read
  RotaryHeads value;
  const void *query_weight, *key_weight;  // of their norms; null: no norm
  const float* scales;                    // null: by `amax`
  float* descales;                        // null: nothing is rounded, for `amax` alone
  unsigned* amax;                         // the largest magnitudes, as bits
  long long rows;
  unsigned value_pieces;  // of a head
  unsigned value_scales;  // 1, or one for each head
  unsigned group;         // threads that share a row: a power of two, of one warp's
  float size, eps;        // of the norms: the numbers of a head
  bool zero_centered, is_weight_float, is_e5m2;
};
