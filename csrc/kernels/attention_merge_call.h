// The argument of the kernels of attention_merge.cu, for both sides.
#pragma once

// A row of one head; of a warp, so that several rows are under way.
constexpr int kAttentionMergeLanes = 16;

// Strides in elements; those of the last dimension of `out` and `part` are 1.
struct AttentionMergeCall {
  void* out;  // [batch, heads, queries, size]
  float* lse;
  const void* part;
  const float* part_lse;
  long long out_batch, out_head, out_query, lse_batch, lse_head, lse_query;
  long long part_batch, part_head, part_query, part_lse_batch, part_lse_head, part_lse_query;
  unsigned heads, queries, rows;
  int pieces;  // of a row
};
