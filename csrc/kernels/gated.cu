// Gated activations, act(gate) * up, and their gradients. Compiled when the package is built
// (cmake/compile_kernels.py); gated_cuda.cpp launches it.

#include "activation.cuh"
#include "gated_call.h"
#include "number.cuh"

template <class Type, class Activation, int kWidth, bool kBackward>
__device__ void gated(const GatedCall& g) {
  using Vector = Piece<Type, kWidth>;
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= g.pieces) return;
  // A long division takes longer than the rest.
  const long long row =
      g.pieces >> 32 ? i / g.pieces_per_row : (unsigned)i / (unsigned)g.pieces_per_row;
  const long long piece = i - row * g.pieces_per_row;
  // In pieces: behind a sum of numbers the compiler would store four bytes at a time.
  const auto at = [&](const void* memory, long long stride) {
    return (const Vector*)memory + (row * stride / kWidth + piece);
  };
  float gate[kWidth], up[kWidth], slope[kWidth], first[kWidth], second[kWidth];
  at(g.gate, g.gate_stride)->read(gate);
  at(g.up, g.up_stride)->read(up);
  if (kBackward) at(g.grad_out, g.grad_stride)->read(slope);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    const float2 activation = Activation::of(gate[k]);
    if (kBackward) {
      first[k] = slope[k] * up[k] * activation.y;
      second[k] = slope[k] * activation.x;
    } else {
      first[k] = activation.x * up[k];
    }
  }
  *(Vector*)at(g.first, g.out_stride) = Vector::of(first);
  if (kBackward) *(Vector*)at(g.second, g.out_stride) = Vector::of(second);
}

#define GATED(name, Type, Activation, suffix, width)                           \
  extern "C" __global__ void gated_##name##_##suffix(GatedCall g) {            \
    gated<Type, Activation, width, false>(g);                                  \
  }                                                                            \
  extern "C" __global__ void gated_##name##_##suffix##_backward(GatedCall g) { \
    gated<Type, Activation, width, true>(g);                                   \
  }

#define GATED_TYPES(name, Activation)              \
  GATED(name, Half, Activation, half_1, 1)         \
  GATED(name, Half, Activation, half_8, 8)         \
  GATED(name, BFloat16, Activation, bfloat16_1, 1) \
  GATED(name, BFloat16, Activation, bfloat16_8, 8) \
  GATED(name, Float, Activation, float_1, 1)       \
  GATED(name, Float, Activation, float_4, 4)

GATED_TYPES(silu, Silu)
GATED_TYPES(gelu, Gelu)
GATED_TYPES(gelu_tanh, GeluTanh)
