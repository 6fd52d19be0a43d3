// The argument of the kernels of paged_merge.cu, for both sides.
#pragma once

// Strides in elements.
struct PagedMergeCall {
  const void *query, *key_cache, *value_cache;
  const int *page_table, *seq_lens_kv;
  const float* sinks;  // null: none
  const void* partial_out;
  const float* partial_lse;
  void* out;
  float* lse;  // null: not wanted
  long long query_batch, query_token, query_head;
  long long key_page, key_slot, key_head, value_page, value_slot, value_head, table_row;
  unsigned batch, queries, heads_kv, group;
  int size, value_size, page_size, hidden;
  float scale, softcap;
};
