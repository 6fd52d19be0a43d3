// Batch norms in evaluation, folded into the weights of the convolutions before them, many at once.
// Compiled when the package is built (cmake/compile_kernels.py); batch_norm_fold_cuda.cpp launches
// them.

#include "batch_norm_fold_call.h"
#include "number.cuh"

template <class Type>
__device__ void fold(const BatchNormFoldCall& call) {
  using Bits = typename Type::Bits;
  int place = 0;
  while (blockIdx.x >= call.norms[place].end) ++place;
  const FoldedNorm& norm = call.norms[place];
  const unsigned channel = blockIdx.x - (place == 0 ? 0 : call.norms[place - 1].end);
  const auto of_channel = [channel](const void* memory, float otherwise) {
    return memory == nullptr ? otherwise : Type::read(((const Bits*)memory)[channel]);
  };

  const float scale =
      rsqrtf(of_channel(norm.var, 0.f) + norm.eps) * of_channel(norm.norm_weight, 1.f);
  if (threadIdx.x == 0) {
    const float moved = of_channel(norm.bias, 0.f) - of_channel(norm.mean, 0.f);
    ((Bits*)norm.out_bias)[channel] = Type::write(moved * scale + of_channel(norm.norm_bias, 0.f));
  }
  const unsigned numbers = norm.inputs * norm.pixels;
  const Bits* weight = (const Bits*)norm.weight + (size_t)channel * numbers;
  Bits* out = (Bits*)norm.out_weight + (size_t)channel * numbers;
#pragma unroll 4
  for (unsigned at = threadIdx.x; at < numbers; at += blockDim.x) {
    const unsigned pixel = at / norm.inputs, input = at - pixel * norm.inputs;
    out[at] = Type::write(Type::read(weight[input * norm.pixels + pixel]) * scale);
  }
}

#define BATCH_NORM_FOLD(name, Type)                     \
  extern "C" __global__ void batch_norm_fold_##name(    \
      const __grid_constant__ BatchNormFoldCall call) { \
    fold<Type>(call);                                   \
  }

BATCH_NORM_FOLD(half, Half)
BATCH_NORM_FOLD(bfloat16, BFloat16)
BATCH_NORM_FOLD(float, Float)
