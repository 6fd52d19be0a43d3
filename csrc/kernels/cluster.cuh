// What the blocks of a cluster do together, and see of each other's shared memory: PTX of compute
// capability 9.0, where clusters are.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define HAS_CLUSTERS 0
#else
#define HAS_CLUSTERS 1
#endif

// All threads of all of its blocks have come here, and see what each wrote to its shared memory.
__device__ void meet_in_cluster() {
#if HAS_CLUSTERS
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
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

__device__ float4 load_from_block(const float4* mine, int block) {
  float4 found{};
#if HAS_CLUSTERS
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(found.x), "=f"(found.y), "=f"(found.z), "=f"(found.w)
               : "r"(address_in_block(mine, block))
               : "memory");
#endif
  return found;
}

__device__ float2 load_from_block(const float2* mine, int block) {
  float2 found{};
#if HAS_CLUSTERS
  asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];"
               : "=f"(found.x), "=f"(found.y)
               : "r"(address_in_block(mine, block))
               : "memory");
#endif
  return found;
}
