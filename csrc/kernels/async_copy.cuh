// Copies from global to shared memory that a thread does not wait for.
#pragma once

// kSize bytes, at a multiple of kSize: 4, 8 or 16. Of fewer than 16 `bytes` the rest of 16 is zero.
template <int kSize>
__device__ void copy_async(void* shared, const void* global, unsigned bytes = kSize) {
#if __CUDA_ARCH__ >= 800
  const auto to = (unsigned)__cvta_generic_to_shared(shared);
  if constexpr (kSize == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
                 "r"(bytes));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(kSize));
  }
#else
  __builtin_memcpy(shared, global, bytes);
  __builtin_memset((unsigned char*)shared + bytes, 0, kSize - bytes);
#endif
}

// What the thread has sent for is there, for itself.
__device__ inline void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// What the thread sends for from here on is another group of copies.
__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;");
#endif
}

// Those of all groups but the `kPending` last are there, for the thread itself.
template <int kPending>
__device__ inline void wait_for_all_but() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}
