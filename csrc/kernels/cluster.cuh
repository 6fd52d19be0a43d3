// What the blocks of a cluster do together, and see of each other's shared memory: PTX of compute
// capability 9.0, where clusters are.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define HAS_CLUSTERS 0
#else
#define HAS_CLUSTERS 1
#endif

// The block's cluster among those of a launch in one dimension, and the block's place in it.
__device__ unsigned cluster_of_block() {
  unsigned cluster = 0;
#if HAS_CLUSTERS
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(cluster));
#endif
  return cluster;
}
__device__ unsigned block_of_cluster() {
  unsigned block = 0;
#if HAS_CLUSTERS
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
#endif
  return block;
}

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
__device__ void wait_in_cluster() {
#if HAS_CLUSTERS
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// All threads of all of its blocks have come here, and see what each wrote to its shared memory.
__device__ void meet_in_cluster() {
  arrive_in_cluster();
  wait_in_cluster();
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

// Puts into shared memory what other blocks load from there.
__device__ void show_to_cluster(float2* mine, float2 value) {
  *mine = value;
}
