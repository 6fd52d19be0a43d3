// How much work comes before each sequence, so that every block of attention over pages finds its
// share. Compiled when the package is built (cmake/compile_kernels.py); paged_decode_cuda.cpp
// launches it.

#include "paged_work.cuh"

// One block: sums over the sequences before, kThreads at a time.
extern "C" __global__ void __launch_bounds__(1024)
    paged_plan(const __grid_constant__ PagedPlanCall call) {
  constexpr int kLanes = 32;
  __shared__ int of_warps[kLanes];
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const int warps = blockDim.x / kLanes;
  int* sums = call.plan + kPagedSums;
  for (int i = threadIdx.x; i < kPagedCounters; i += blockDim.x) call.plan[i] = 0;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kPagedHead; ++i) {
      call.plan[kPagedCounters + i] = paged_head(call.work, i);
    }
    sums[0] = 0;
  }
  int before = 0;
  for (int start = 0; start < call.work.batch; start += blockDim.x) {
    const int index = start + threadIdx.x;
    int sum = 0;
    if (index < call.work.batch) {
      const PagedSpan span(call.work, PagedSequence(call.work, index), call.work.rows);
      sum = span.cost() * span.row_blocks;
    }
    for (int step = 1; step < kLanes; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == kLanes - 1) of_warps[warp] = sum;
    __syncthreads();
    int mine = 0, all = 0;
    for (int i = 0; i < warps; ++i) {
      if (i < warp) mine += of_warps[i];
      all += of_warps[i];
    }
    if (index < call.work.batch) sums[index + 1] = before + mine + sum;
    before += all;
    __syncthreads();
  }
}
