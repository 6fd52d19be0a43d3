// Copies and stores of lines that the L2 cache is to give up before others.
#pragma once

// For copy_async_by(): of lines that are read once, which the cache gives up first, or of others.
__device__ inline unsigned long long l2_policy(bool is_once) {
  unsigned long long policy = 0;
#if __CUDA_ARCH__ >= 800
  if (is_once) {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  } else {
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  }
#endif
  return policy;
}

// As copy_async() of async_copy.cuh, 8 or 16 bytes, by such a policy. What the thread has read
// there before, it has read.
template <int kSize>
__device__ void copy_async_by(void* shared, const void* global, unsigned long long policy) {
#if __CUDA_ARCH__ >= 800
  const auto to = (unsigned)__cvta_generic_to_shared(shared);
  if constexpr (kSize == 16) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(global), "l"(policy)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], %2, %3;" ::"r"(to),
                 "l"(global), "n"(kSize), "l"(policy)
                 : "memory");
  }
#else
  __builtin_memcpy(shared, global, kSize);
#endif
}

// Stores 8 or 16 bytes that the L2 cache may give up before others.
template <class Whole>
__device__ void store_once(Whole* to, const Whole& whole) {
#if __CUDA_ARCH__ >= 800
  const union {
    Whole all;
    unsigned words[sizeof(Whole) / 4];
  } stored = {whole};
  const auto& words = stored.words;
  if constexpr (sizeof(Whole) == 16) {
    asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  } else {
    asm volatile("st.global.cs.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(words[0]), "r"(words[1])
                 : "memory");
  }
#else
  *to = whole;
#endif
}
