// What the kernels of depthwise convolutions of one dimension share, whichever is last in memory.
#pragma once

#include "activation.cuh"
#include "activation_list.h"
#include "column_sums.cuh"
#include "depthwise_conv1d_call.h"
#include "number.cuh"

#define ENUMERATOR(name, Name) k##Name,
enum : int { CUDNN_OPS_ACTIVATIONS(ENUMERATOR) };
#undef ENUMERATOR

using namespace depthwise;

// What comes after the convolution, for the `count` outputs of a run that exist.
template <class Type, class Activation, int kWidth>
__device__ void finish(const DepthwiseConv1dCall& call, float (&sums)[kRun][kWidth],
                       const float (&bias)[kWidth], long long index, int step, int count) {
  using Vector = Piece<Type, kWidth>;
#pragma unroll
  for (int r = 0; r < kRun; ++r, index += step) {
    if (r >= count) return;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sums[r][k] += bias[k];
    if (call.residual != nullptr) ((const Vector*)call.residual)[index].add_to(sums[r]);
    if (call.before != nullptr) ((Vector*)call.before)[index] = Vector::of(sums[r]);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sums[r][k] = Activation::of(sums[r][k]).x;
    ((Vector*)call.out)[index] = Vector::of(sums[r]);
  }
}

template <class Type, int kWidth>
__device__ void finish_run(const DepthwiseConv1dCall& call, float (&sums)[kRun][kWidth],
                           const float (&bias)[kWidth], long long index, int step, int count) {
  switch (call.activation) {
#define CASE(name, Name) \
  case k##Name: finish<Type, Name, kWidth>(call, sums, bias, index, step, count); break;
    CUDNN_OPS_ACTIVATIONS(CASE)
#undef CASE
  }
}

// What the blocks of a row of blocks add up to: the gradient, or their part of it.
template <class Type>
__device__ void write_sum(const DepthwiseConv1dWeightCall& call, long long at, float sum) {
  if (gridDim.y == 1) {
    ((typename Type::Bits*)call.grad_weight)[at] = Type::write(sum);
  } else {
    call.partial[(long long)blockIdx.y * call.shape.channels * call.shape.taps + at] = sum;
  }
}

// The bounds of a launch, in parentheses: threads of a block, and blocks of a multiprocessor.
#define KERNEL(name, Call, function, bounds)                                   \
  extern "C" __global__ void __launch_bounds__ bounds depthwise_conv1d_##name( \
      const __grid_constant__ Call call) {                                     \
    function(call);                                                            \
  }
