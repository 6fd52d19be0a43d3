// What the kernels of group norm's gradients share: the sums of channels, and what is made of them.
#pragma once

#include "column_sums.cuh"
#include "group_norm.cuh"

// Of a channel's numbers.
struct Sums {
  float floats[2];  // of the gradient, and of it times the normed number

  __device__ void take(const Sums& other) {
    floats[0] += other.floats[0];
    floats[1] += other.floats[1];
  }
};

// The sums of so many groups over their channels, each times its weight; `found` are those of the
// channels from `first_channel` on, and `write` gets the group's number and both. Every thread of
// the block must come here.
template <class Write>
__device__ void add_up_groups(const GroupNormCall& call, const float2* found,
                              unsigned first_channel, unsigned groups, const Write& write) {
  const unsigned group_channels = call.channels / call.groups;
  const unsigned threads = group_threads(groups), lane = threadIdx.x % threads;
  const unsigned together = blockDim.x / threads;
  for (unsigned first = 0; first < groups; first += together) {
    const unsigned group = first + threadIdx.x / threads;
    float sum = 0, along = 0;
    for (unsigned i = lane; i < group_channels && group < groups; i += threads) {
      const unsigned channel = group * group_channels + i;
      const float weight = weight_of(call, first_channel + channel);
      sum = fmaf(weight, found[channel].x, sum);
      along = fmaf(weight, found[channel].y, along);
    }
    sum = sum_within_warp(sum, threads);
    along = sum_within_warp(along, threads);
    if (lane == 0 && group < groups) write(group, sum, along);
  }
}

// Strips of 32 channels whose gradients of weight and bias are wanted.
__device__ unsigned strips_of_totals(const GroupNormCall& call) {
  return call.grad_weight == nullptr && call.grad_bias == nullptr ? 0 : (call.channels + 31) / 32;
}

// The gradients of weight, or for the second half of the strips of bias, from the sums of all rows.
// By a block.
__device__ void add_up_totals(const GroupNormCall& call, unsigned strip) {
  const unsigned strips = strips_of_totals(call), rows = call.samples * call.spread.stretches;
  const bool is_weight = strip < strips;
  void* out = is_weight ? call.grad_weight : call.grad_bias;
  if (out == nullptr) return;
  const bool is_float = is_weight ? call.is_weight_float : call.is_bias_float;
  const auto write = [&](unsigned channel, float sum) {
    if (is_float) {
      ((float*)out)[channel] = sum;
    } else {
      ((Bits*)out)[channel] = Type::write(sum);
    }
  };
  const long long numbers = (long long)rows * call.channels;
  add_up_columns(call.partial + (is_weight ? numbers : 0), rows, call.channels, write,
                 is_weight ? strip : strip - strips);
}
