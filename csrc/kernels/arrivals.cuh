// What copies to shared memory count in (async_copy.cuh), so that every thread can wait for those
// of all others: an mbarrier, of compute capability 9.0.
#pragma once

struct Arrivals {
  unsigned long long state;

  // By one thread, before any other comes to it: of so many threads.
  __device__ void begin(unsigned threads) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address()), "r"(threads) : "memory");
#endif
  }
  // By each of them, once: when all is there that it has sent for.
  __device__ void count_copies() {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address()) : "memory");
#endif
  }
  // Until all of them have been counted.
  __device__ void wait() {
#if __CUDA_ARCH__ >= 900
    unsigned is_over;
    do {
      asm volatile(
          "{\n"
          ".reg .pred over;\n"
          "mbarrier.try_wait.parity.shared.b64 over, [%1], 0;\n"
          "selp.u32 %0, 1, 0, over;\n"
          "}"
          : "=r"(is_over)
          : "r"(address())
          : "memory");
    } while (is_over == 0);
#endif
  }

 private:
  __device__ unsigned address() const {
    return (unsigned)__cvta_generic_to_shared(this);
  }
};
