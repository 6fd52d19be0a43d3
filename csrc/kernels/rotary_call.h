// What the kernels of rotary.cu are called with: one header for both sides.
#pragma once

// Strides in elements; the last dimensions lie densely. The output is [B, S, H, D] in memory.
struct RotaryCall {
  const void *input, *cos, *sin;
  void* out;
  long long batch_stride, head_stride, token_stride;  // of the input
  long long cos_batch_stride, cos_token_stride, sin_batch_stride, sin_token_stride;
  long long pieces;              // of all first halves
  unsigned tokens, heads, half;  // half: pieces of half a head
  bool is_backward;
};

// Heads of queries or of keys.
struct RotaryHeads {
  const void* input;
  void* out;
  long long batch_stride, head_stride, token_stride;
  unsigned heads;
};

// Cosines or sines. A row of theirs is a token's, or the one that a position names.
struct RotaryFactors {
  const void* data;
  long long axis_stride, batch_stride, row_stride;
};

constexpr int kMostSections = 4;

// Queries and keys, of which a part may turn, in any order of pairs.
struct RotaryAnyCall {
  RotaryHeads query, key;
  RotaryFactors cos, sin;
  const void* positions;  // nullptr: of no table
  long long position_axis_stride, position_batch_stride, position_token_stride;
  long long table_rows;
  long long items;                   // of all heads: what a thread turns or copies
  unsigned ends[kMostSections - 1];  // the first pair behind each section but the last
  unsigned tokens, row_items;        // row_items: of one head
  unsigned half;                     // pieces of half of what turns: an item each
  unsigned pieces;                   // of a head
  bool is_interleaved, has_factor_of_pair, has_long_positions, is_backward;
};
