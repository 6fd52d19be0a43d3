// Writes the keys and values of new tokens into their pages. Compiled to PTX when the package is
// built (cmake/compile_ptx.py); paged_append_cuda.cpp launches it, with structs alike.

// Of the keys or of the values; strides in units of a copy.
struct Side {
  const void* tokens;
  void* cache;
  long long token_stride, token_head_stride;
  long long page_stride, slot_stride, head_stride;
  unsigned units;  // of one head
};

// Block row 0 writes the keys, 1 the values; a thread copies one unit.
template <class Unit>
__device__ void append(const Side& side, const long long* slot_mapping, unsigned tokens,
                       unsigned heads, unsigned page_size, long long slots) {
  const unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned per_token = heads * side.units;
  const unsigned token = (unsigned)(i / per_token);
  if (token >= tokens) return;
  const long long slot = slot_mapping[token];
  if (slot < 0 || slot >= slots) return;
  const unsigned in_token = (unsigned)(i % per_token);
  const unsigned head = in_token / side.units, unit = in_token % side.units;
  const Unit* from =
      (const Unit*)side.tokens + token * side.token_stride + head * side.token_head_stride + unit;
  Unit* to = (Unit*)side.cache + slot / page_size * side.page_stride +
             slot % page_size * side.slot_stride + head * side.head_stride + unit;
  *to = *from;
}

#define PAGED_APPEND(bytes, Unit)                                                               \
  extern "C" __global__ void paged_append_##bytes(                                              \
      Side key, Side value, const long long* slot_mapping, unsigned tokens, unsigned heads,     \
      unsigned page_size, long long slots) {                                                    \
    append<Unit>(blockIdx.y == 0 ? key : value, slot_mapping, tokens, heads, page_size, slots); \
  }

PAGED_APPEND(16, uint4)
PAGED_APPEND(8, uint2)
PAGED_APPEND(4, unsigned)
PAGED_APPEND(2, unsigned short)
PAGED_APPEND(1, unsigned char)
