// A barrier of some warps of a block.
#pragma once

// The `group` threads that share a row, whole warps, have all come here, and see what each wrote to
// shared memory. A block has 15 groups at most, or is one.
__device__ inline void meet_in_group(unsigned group) {
  if (group == blockDim.x) return __syncthreads();
  const unsigned index = threadIdx.x / group + 1;  // the first barrier is the block's
  asm volatile("bar.sync %0, %1;" ::"r"(index), "r"(group) : "memory");
}
