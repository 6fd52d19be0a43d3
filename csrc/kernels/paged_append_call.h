// The argument of the kernels of paged_append.cu, for both sides.
#pragma once

constexpr unsigned kAppendedTokens = 4;  // of a block: that many copies are in flight per thread

// The keys or the values; strides in units of a copy. Where tokens are rounded, a unit is so many
// numbers, on both sides.
struct PagedAppendSide {
  const void* tokens;
  void* cache;
  long long token_stride, token_head_stride;
  long long page_stride, slot_stride, head_stride;
  unsigned units;         // of one head
  const float* descale;   // of what is rounded; null: 1
  unsigned descale_step;  // to the next head
};

struct PagedAppendCall {
  PagedAppendSide key, value;
  const long long* slot_mapping;
  unsigned tokens, heads, page_size, slots;
};
