// What the blocks of a cluster do together, and see of each other's shared memory: PTX of compute
// capability 9.0, where clusters are.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define HAS_CLUSTERS 0
#else
#define HAS_CLUSTERS 1
#endif

// This thread has begun: no block may write to another's shared memory before all of it has.
__device__ void begin_in_cluster() {
#if HAS_CLUSTERS
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// A barrier in two halves: behind the second one all threads of all blocks have come to the first,
// and what they wrote to shared memory before that can be read.
__device__ void arrive_in_cluster() {
#if HAS_CLUSTERS
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ void wait_for_cluster() {
#if HAS_CLUSTERS
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Where in a block's shared memory is what lies at `mine` in this one's.
__device__ unsigned address_in_block(const void* mine, int block) {
  unsigned address = 0;
#if HAS_CLUSTERS
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"((unsigned)__cvta_generic_to_shared(mine)), "r"(block));
#endif
  return address;
}

__device__ void store_to_block(float4* mine, int block, const float4& value) {
#if HAS_CLUSTERS
  asm volatile(
      "st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address_in_block(mine, block)),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
      : "memory");
#endif
}

__device__ void store_to_block(float2* mine, int block, const float2& value) {
#if HAS_CLUSTERS
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1,%2};" ::"r"(address_in_block(mine, block)),
               "f"(value.x), "f"(value.y)
               : "memory");
#endif
}
