// What threads do together: wait for the kernels before theirs, and add up what each of them has.
#pragma once

// The kernels before it in the stream have written what this one reads; only what comes behind this
// overlaps with them.
__device__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may start, up to where it waits in its turn.
__device__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Over the lanes of a warp, or over each `group` of them, a power of two.
__device__ float sum_within_warp(float value, unsigned group) {
  if (group < 32) {
    for (unsigned distance = group / 2; distance > 0; distance /= 2) {
      value += __shfl_xor_sync(~0u, value, distance);
    }
  } else {
#pragma unroll
    for (unsigned distance = 16; distance > 0; distance /= 2) {
      value += __shfl_xor_sync(~0u, value, distance);
    }
  }
  return value;
}

// Over the `group` threads that share a row: as above, or the block's whole warps, every thread of
// which must come here. `scratch` is free again after the next barrier.
template <int kSums>
__device__ void sum_up(float (&sums)[kSums], unsigned group, float (*scratch)[32]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = sum_within_warp(sums[i], group);
  if (group <= 32) return;
  const unsigned lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    if (lane == 0) scratch[i][threadIdx.x / 32] = sums[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    sums[i] = sum_within_warp(lane < group / 32 ? scratch[i][lane] : 0, 32);
  }
}
