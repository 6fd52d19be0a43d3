// What the kernels of group_norm_resident_last.cu and group_norm_resident_first.cu share: gradients
// of group norm by one launch whose blocks all run at the same time, or have whole groups. Which
// sums there are is told in group_norm_backward.cu, whose kernels take three launches.
//
// A block keeps a part of a unit's inputs and of the gradients of its outputs
// (group_norm_resident.cuh), and finds the sums of its channels and groups; when all blocks have
// (grid_barrier.cuh) it adds up those of its unit's groups, every block in the same order, and
// writes the gradient. What does not fit is read again behind the barrier, the last of it first,
// which is in the L2 cache still. The gradients of weight and bias are added up at the end, each
// strip of channels by one of the blocks; where no block waits, by a launch of their own.
#pragma once

#include "group_norm_resident.cuh"
#include "group_norm_sums.cuh"

// Shared memory behind the pieces: what lanes, or warps, found; the sums of the unit's channels in
// this part; the slopes of its groups; and where channels are first, their parameters.
struct Room {
  float* scratch;
  float2 *channels, *slopes, *parameters;

  __device__ Room(const GroupNormCall& call, unsigned channel_count, unsigned groups) {
    extern __shared__ uint4 memory[];
    auto* behind = (unsigned char*)memory + call.spread.kept;
    scratch = (float*)behind;
    channels = (float2*)(behind + call.spread.scratch);
    slopes = channels + channel_count;
    parameters = slopes + groups;
  }
};

// What SiLU's argument comes multiplied by.
__device__ float scale_of(const GroupNormCall& call) {
  return call.has_silu ? Silus::kScale : 1;
}

// Of the unit's groups, from all its parts.
__device__ void find_slopes(const GroupNormCall& call, unsigned unit, unsigned groups,
                            float2* slopes) {
  const unsigned stretches = call.spread.stretches;
  const auto* sums = (const float2*)call.group_partial + (long long)unit * stretches * groups;
  const unsigned threads = group_threads(groups), lane = threadIdx.x % threads;
  for (unsigned first = 0; first < groups; first += blockDim.x / threads) {
    const unsigned group = first + threadIdx.x / threads;
    float2 found = {};
#pragma unroll 4
    for (unsigned row = lane; row < stretches && group < groups; row += threads) {
      const float2 here = sums[row * groups + group];
      found.x += here.x;
      found.y += here.y;
    }
    found.x = sum_within_warp(found.x, threads);
    found.y = sum_within_warp(found.y, threads);
    if (lane > 0 || group >= groups) continue;
    slopes[group] = slopes_of(call, unit * groups + group, found.x, found.y);
  }
}

// Waits until the sums of the unit's groups are there, and finds their slopes.
__device__ void join_parts(const GroupNormCall& call, unsigned unit, unsigned groups,
                           float2* slopes) {
  if (call.spread.stretches > 1) {
    wait_for_grid(arrive_at_grid());
  } else {
    __syncthreads();
  }
  find_slopes(call, unit, groups, slopes);
  __syncthreads();
}

// The gradients of weight and bias, if blocks have waited for each other.
__device__ void add_up_totals(const GroupNormCall& call) {
  if (call.spread.stretches == 1) return;
  const unsigned strips = strips_of_totals(call);
  for (unsigned strip = blockIdx.x; strip < 2 * strips; strip += gridDim.x) {
    add_up_totals(call, strip);
    __syncthreads();
  }
}

#define GROUP_NORM_RESIDENT_BACKWARD(bytes, order, threads) \
  GROUP_NORM_KERNEL(resident_backward_##bytes##_##order, threads, 1, resident_backward<bytes>)
