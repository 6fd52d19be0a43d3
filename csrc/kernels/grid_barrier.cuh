// A barrier of all blocks of a launch, which has to be cooperative (DeviceKernel): all of them run
// at once. It is that of cooperative_groups, for whose headers NVRTC has no place here: the driver
// gives every launch a word of its own to count in, also where a CUDA graph is replayed or two
// streams launch the same kernel, and its address in two registers of the environment
// (cooperative_groups/details/driver_abi.h). Nothing has to be cleared, and what a launch that was
// aborted left is nobody's.
#pragma once

constexpr unsigned kHasFlipped = 1u << 31;

__device__ inline unsigned* arrived_blocks() {
  unsigned high, low;
  asm("mov.u32 %0, %%envreg1;" : "=r"(high));
  asm("mov.u32 %0, %%envreg2;" : "=r"(low));
  const unsigned long long workspace = (unsigned long long)high << 32 | low;
  return (unsigned*)workspace + 1;  // behind the workspace's size
}

// What the block's threads have written is there for those that have waited. Every thread of the
// block must come here; to be handed on by each to wait_for_grid().
__device__ inline unsigned arrive_at_grid() {
  __syncthreads();
  if (threadIdx.x > 0) return 0;
  // All blocks together add the highest bit, which flips when the last of them comes.
  const unsigned own = blockIdx.x == 0 ? kHasFlipped - (gridDim.x - 1) : 1;
  unsigned before;
  asm volatile("atom.add.release.gpu.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(arrived_blocks()), "r"(own)
               : "memory");
  return before;
}

__device__ inline void wait_for_grid(unsigned before) {
  if (threadIdx.x == 0) {
    unsigned now;
    do {
      asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(now) : "l"(arrived_blocks()) : "memory");
    } while (((before ^ now) & kHasFlipped) == 0);
  }
  __syncthreads();
}
