// What the kernels of the weight's gradient share: where the sums of a block go.
#pragma once

#include "depthwise_conv.cuh"

__device__ inline int taps_of(const DepthwiseConvShape& shape) {
  return shape.taps[0] * shape.taps[1] * shape.taps[2];
}

// The gradient of a tap, or behind the last one of the bias.
__device__ inline void write_gradient(const DepthwiseConvWeightCall& call, int taps, int tap,
                                      int channel, float sum) {
  if (tap < taps) {
    ((Bits*)call.grad_weight)[(long long)channel * taps + tap] = Type::write(sum);
  } else {
    ((Bits*)call.grad_bias)[channel] = Type::write(sum);
  }
}

// What one of the sets of tiles adds to it: the gradient itself where there is one set.
__device__ inline void write_sum(const DepthwiseConvWeightCall& call, long long set, int tap,
                                 int channel, float sum) {
  const int taps = taps_of(call.shape);
  if (call.partials == 1) return write_gradient(call, taps, tap, channel, sum);
  const int all = taps + (call.grad_bias != nullptr ? 1 : 0);
  call.partial[(set * all + tap) * call.shape.channels + channel] = sum;
}
