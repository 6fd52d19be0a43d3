// Copies from memory to shared memory that nobody waits for: cp.async takes 4, 8 or 16 bytes.
#pragma once

// Of fewer bytes than kSize the rest is zero.
template <int kSize>
__device__ void copy_async(void* shared, const void* global, unsigned bytes) {
  const auto to = (unsigned)__cvta_generic_to_shared(shared);
  if constexpr (kSize == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
                 "r"(bytes));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(kSize));
  }
}
