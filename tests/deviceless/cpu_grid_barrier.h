// What csrc/kernels/grid_barrier.cuh has, for a CPU, whose blocks run one after another: all of
// them up to the barrier, then all again and past it. What a kernel writes before its barrier, of
// which it may have one, must be the same when it is written twice.
#pragma once

inline unsigned arrive_at_grid() {
  __syncthreads();
  if (!the_grid.passes_barrier) {
    the_grid.has_barrier = true;
    end_thread();
  }
  return 0;
}
inline void wait_for_grid(unsigned) {
}
