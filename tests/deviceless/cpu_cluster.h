// What csrc/kernels/cluster.cuh has, for a CPU, whose blocks run one after another: as in
// cpu_grid_barrier.h all of them up to where they first wait, then all again and past it.
#pragma once

#include <map>
#include <utility>

inline std::map<std::pair<unsigned, const void*>, float2> shown_to_cluster;

inline void show_to_cluster(float2* mine, float2 value) {
  *mine = shown_to_cluster[{blockIdx.x, mine}] = value;
}
inline unsigned cluster_of_block() {
  return blockIdx.x / the_grid.cluster;
}
inline unsigned block_of_cluster() {
  return blockIdx.x % the_grid.cluster;
}
inline float2 load_from_block(const float2* mine, int block) {
  return shown_to_cluster.at({cluster_of_block() * the_grid.cluster + block, mine});
}
inline void arrive_in_cluster() {
  __syncthreads();
  if (!the_grid.passes_barrier) {
    the_grid.has_barrier = true;
    end_thread();
  }
}
inline void wait_in_cluster() {
}
inline void meet_in_cluster() {
  arrive_in_cluster();
}
