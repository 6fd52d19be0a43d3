// What csrc/kernels/arrivals.cuh has, for a CPU, where copies are there at once: those of all
// threads when all have come to wait for them.
#pragma once

struct Arrivals {
  unsigned long long state;

  void begin(unsigned) {
  }
  void count_copies() {
  }
  void wait() {
    __syncthreads();
  }
};
