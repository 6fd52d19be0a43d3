// Writes the keys and values of new tokens into their pages. Compiled when the package is
// built (cmake/compile_kernels.py); paged_append_cuda.cpp launches it.

#include "fp8.cuh"
#include "paged_append_call.h"

// What a unit is copied as.
template <class Type>
struct Copied {
  using From = Type;
  using To = Type;
  static __device__ To of(const From& unit, const PagedAppendSide&, unsigned) {
    return unit;
  }
};

// kWidth numbers, rounded.
template <class Type, int kWidth>
struct Rounded {
  using From = Piece<Type, kWidth>;
  using To = Fp8Piece<E4M3, kWidth>;
  static __device__ To of(const From& unit, const PagedAppendSide& side, unsigned head) {
    float values[kWidth];
    unit.read(values);
    if (side.descale != nullptr) {
      const float scale = 1 / side.descale[head * side.descale_step];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) values[k] *= scale;
    }
    return To::of(values);
  }
};

// Block row 0 writes the keys, 1 the values.
template <class Unit>
__device__ void append(const PagedAppendCall& call) {
  constexpr unsigned kTokens = kAppendedTokens;
  const PagedAppendSide side = blockIdx.y == 0 ? call.key : call.value;
  const typename Unit::From* from[kTokens];
  typename Unit::To* to[kTokens];
#pragma unroll
  for (unsigned i = 0; i < kTokens; ++i) {
    const unsigned token = blockIdx.x * kTokens + i;
    const long long slot = token < call.tokens ? call.slot_mapping[token] : -1;
    const bool is_there = slot >= 0 && slot < call.slots;
    const unsigned page = (unsigned)slot / call.page_size;
    const unsigned in_page = (unsigned)slot % call.page_size;
    from[i] =
        is_there ? (const typename Unit::From*)side.tokens + token * side.token_stride : nullptr;
    to[i] = (typename Unit::To*)side.cache + page * side.page_stride + in_page * side.slot_stride;
  }
  for (unsigned i = threadIdx.x; i < call.heads * side.units; i += blockDim.x) {
    const unsigned head = i / side.units, unit = i % side.units;
    const long long source = head * side.token_head_stride + unit;
    const long long target = head * side.head_stride + unit;
    typename Unit::From copies[kTokens];
#pragma unroll
    for (unsigned k = 0; k < kTokens; ++k) {
      if (from[k]) copies[k] = from[k][source];
    }
#pragma unroll
    for (unsigned k = 0; k < kTokens; ++k) {
      if (from[k]) to[k][target] = Unit::of(copies[k], side, head);
    }
  }
}

#define PAGED_APPEND(name, ...)                                                                  \
  extern "C" __global__ void paged_append_##name(const __grid_constant__ PagedAppendCall call) { \
    append<__VA_ARGS__>(call);                                                                   \
  }

PAGED_APPEND(16, Copied<uint4>)
PAGED_APPEND(8, Copied<uint2>)
PAGED_APPEND(4, Copied<unsigned>)
PAGED_APPEND(2, Copied<unsigned short>)
PAGED_APPEND(1, Copied<unsigned char>)
PAGED_APPEND(half_8, Rounded<Half, 8>)
PAGED_APPEND(half_1, Rounded<Half, 1>)
PAGED_APPEND(bfloat16_8, Rounded<BFloat16, 8>)
PAGED_APPEND(bfloat16_1, Rounded<BFloat16, 1>)
PAGED_APPEND(float_4, Rounded<Float, 4>)
PAGED_APPEND(float_1, Rounded<Float, 1>)
