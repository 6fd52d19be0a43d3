// What the kernels of fp8.cu are called with: one header for both sides.
#pragma once

// Numbers of a tensor in pieces of several, in the order in which they lie in memory: rows of
// `width` pieces, `pitch` apart in the input and side by side in the output. Each `inner` pieces
// are of one group, and the groups take turns.
struct Fp8Call {
  const void* input;
  void* out;
  const float* scales;  // of each group: what its numbers are multiplied with; null: by `amax`
  float* descales;      // the other way; written where not null
  unsigned* amax;       // of each group: the largest magnitude, as bits
  long long pieces;     // of each group
  long long inner, width, pitch;
  unsigned groups;
  bool is_power;  // whether the scales that follow from `amax` are powers of two
};

// The numbers that a plan of FP8 attention reads, each at a multiple of 16 bytes.
struct Fp8NumbersCall {
  const float *descale_query, *descale_key;
  const float* descale_value;  // null: 1
  const float* scale_out;      // null: 1 / descale_value
  float* numbers;              // those three, descale_s, scale_s, scale_o, 1 / scale_o
  float *amax, *amax_out;      // set to 0
  float scale;                 // of the probabilities
  bool is_scaled;              // whether the output is: else scale_o is 1
  bool is_widened;             // both are 1, and the last number is descale_value
  // The lengths of the sequences, or null: all have `queries` and `keys`.
  const int *lengths, *lengths_kv;
  int *told, *told_kv;  // null: there are none
  int batch, queries, keys;
};
