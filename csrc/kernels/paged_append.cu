// Writes the keys and values of new tokens into their pages. Compiled when the package is
// built (cmake/compile_kernels.py); paged_append_cuda.cpp launches it, with structs alike.

// Of the keys or of the values; strides in units of a copy.
struct Side {
  const void* tokens;
  void* cache;
  long long token_stride, token_head_stride;
  long long page_stride, slot_stride, head_stride;
  unsigned units;  // of one head
};

constexpr unsigned kTokens = 4;  // of a block: that many copies are under way in each thread

// Block row 0 writes the keys, 1 the values.
template <class Unit>
__device__ void append(const Side& side, const long long* slot_mapping, unsigned tokens,
                       unsigned heads, unsigned page_size, unsigned slots) {
  const Unit* from[kTokens];
  Unit* to[kTokens];
#pragma unroll
  for (unsigned i = 0; i < kTokens; ++i) {
    const unsigned token = blockIdx.x * kTokens + i;
    const long long slot = token < tokens ? slot_mapping[token] : -1;
    const bool is_there = slot >= 0 && slot < slots;
    const unsigned page = (unsigned)slot / page_size, in_page = (unsigned)slot % page_size;
    from[i] = is_there ? (const Unit*)side.tokens + token * side.token_stride : nullptr;
    to[i] = (Unit*)side.cache + page * side.page_stride + in_page * side.slot_stride;
  }
  for (unsigned i = threadIdx.x; i < heads * side.units; i += blockDim.x) {
    const unsigned head = i / side.units, unit = i % side.units;
    const long long source = head * side.token_head_stride + unit;
    const long long target = head * side.head_stride + unit;
    Unit copies[kTokens];
#pragma unroll
    for (unsigned k = 0; k < kTokens; ++k) {
      if (from[k]) copies[k] = from[k][source];
    }
#pragma unroll
    for (unsigned k = 0; k < kTokens; ++k) {
      if (from[k]) to[k][target] = copies[k];
    }
  }
}

#define PAGED_APPEND(bytes, Unit)                                                           \
  extern "C" __global__ void paged_append_##bytes(                                          \
      Side key, Side value, const long long* slot_mapping, unsigned tokens, unsigned heads, \
      unsigned page_size, unsigned slots) {                                                 \
    const Side side = blockIdx.y == 0 ? key : value;                                        \
    append<Unit>(side, slot_mapping, tokens, heads, page_size, slots);                      \
  }

PAGED_APPEND(16, uint4)
PAGED_APPEND(8, uint2)
PAGED_APPEND(4, unsigned)
PAGED_APPEND(2, unsigned short)
PAGED_APPEND(1, unsigned char)
