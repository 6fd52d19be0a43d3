// Writes the keys and values of new tokens into their pages. Compiled when the package is
// built (cmake/compile_kernels.py); paged_append_cuda.cpp launches it.

#include "paged_append_call.h"

// Block row 0 writes the keys, 1 the values.
template <class Unit>
__device__ void append(const PagedAppendCall& call) {
  constexpr unsigned kTokens = kAppendedTokens;
  const PagedAppendSide side = blockIdx.y == 0 ? call.key : call.value;
  const Unit* from[kTokens];
  Unit* to[kTokens];
#pragma unroll
  for (unsigned i = 0; i < kTokens; ++i) {
    const unsigned token = blockIdx.x * kTokens + i;
    const long long slot = token < call.tokens ? call.slot_mapping[token] : -1;
    const bool is_there = slot >= 0 && slot < call.slots;
    const unsigned page = (unsigned)slot / call.page_size;
    const unsigned in_page = (unsigned)slot % call.page_size;
    from[i] = is_there ? (const Unit*)side.tokens + token * side.token_stride : nullptr;
    to[i] = (Unit*)side.cache + page * side.page_stride + in_page * side.slot_stride;
  }
  for (unsigned i = threadIdx.x; i < call.heads * side.units; i += blockDim.x) {
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

#define PAGED_APPEND(bytes, Unit)                                                                 \
  extern "C" __global__ void paged_append_##bytes(const __grid_constant__ PagedAppendCall call) { \
    append<Unit>(call);                                                                           \
  }

PAGED_APPEND(16, uint4)
PAGED_APPEND(8, uint2)
PAGED_APPEND(4, unsigned)
PAGED_APPEND(2, unsigned short)
PAGED_APPEND(1, unsigned char)
