// What the kernels of moe_order.cu are called with: one header for both sides.
#pragma once

constexpr unsigned kOrderWarps = 8;  // of a block

// A pair is a token and one of its experts. Pairs that have none are a group of their own, the
// last one.
struct MoeOrderCall {
  const void* experts;  // of each pair, int32 or int64
  unsigned* counts;     // [blocks, groups]; not read if there is one block
  int* offsets;         // where the rows of each expert end
  int* positions;       // of each pair; ~position of those without an expert
  long long pairs;
  unsigned groups;  // experts and one
  unsigned rounds;  // a warp has 32 pairs in each
};
