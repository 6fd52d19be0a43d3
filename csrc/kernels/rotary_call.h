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
