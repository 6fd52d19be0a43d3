// Sorts pairs of a token and an expert by their experts, stably: a histogram of each block's pairs,
// and then each pair's place, from those of the blocks, warps and lanes before it. Nothing depends
// on which thread comes first. Compiled when the package is built (cmake/compile_kernels.py);
// moe_order_cuda.cpp launches it.

#include "moe_order_call.h"

constexpr unsigned kAll = 0xffffffffu;

// How many of each group the warp has had, one behind the other for each warp.
__device__ unsigned* counts_of_warps() {
  extern __shared__ unsigned counts[];
  return counts;
}

// Goes through the warp's pairs in their order: `visit` gets a pair, its group and how many of that
// group the warp has had before it.
template <class Index, class Visit>
__device__ void visit_pairs(const MoeOrderCall& call, unsigned* counts, const Visit& visit) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const long long first = ((long long)blockIdx.x * kOrderWarps + warp) * call.rounds * 32;
  for (unsigned round = 0; round < call.rounds; ++round) {
    if (first + round * 32 >= call.pairs) break;  // for all lanes
    const long long pair = first + round * 32 + lane;
    const bool is_there = pair < call.pairs;
    const long long expert = is_there ? (long long)((const Index*)call.experts)[pair] : -1;
    const bool has_one = expert >= 0 && expert < call.groups - 1;
    const unsigned group = has_one ? (unsigned)expert : call.groups - 1;
    // Lanes behind the last pair are told apart from pairs without an expert.
    const unsigned peers = __match_any_sync(kAll, is_there ? group : call.groups);
    const unsigned before = __popc(peers & ((1u << lane) - 1));
    if (is_there) visit(pair, group, counts[group] + before);
    __syncwarp();
    if (is_there && before == 0) counts[group] += __popc(peers);
    __syncwarp();
  }
}

// Leaves for each warp how many of each group it has.
template <class Index>
__device__ void count_pairs(const MoeOrderCall& call) {
  unsigned* counts = counts_of_warps();
  for (unsigned i = threadIdx.x; i < kOrderWarps * call.groups; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  visit_pairs<Index>(call, counts + threadIdx.x / 32 * call.groups,
                     [](long long, unsigned, unsigned) {});
  __syncthreads();
}

template <class Index>
__device__ void count(const MoeOrderCall& call) {
  count_pairs<Index>(call);
  const unsigned* counts = counts_of_warps();
  for (unsigned group = threadIdx.x; group < call.groups; group += blockDim.x) {
    unsigned sum = 0;
    for (unsigned warp = 0; warp < kOrderWarps; ++warp) sum += counts[warp * call.groups + group];
    call.counts[(long long)blockIdx.x * call.groups + group] = sum;
  }
}

// In place of each group's count in all blocks, what comes before it.
__device__ void add_up_groups(unsigned* totals, unsigned groups) {
  __shared__ unsigned of_warps[kOrderWarps];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned each = (groups + blockDim.x - 1) / blockDim.x;
  const unsigned first = threadIdx.x * each;
  const unsigned end = first + each < groups ? first + each : groups;
  unsigned own = 0;
  for (unsigned group = first; group < end; ++group) own += totals[group];
  unsigned up_to = own;
  for (unsigned distance = 1; distance < 32; distance *= 2) {
    const unsigned other = __shfl_up_sync(kAll, up_to, distance);
    if (lane >= distance) up_to += other;
  }
  if (lane == 31) of_warps[warp] = up_to;
  __syncthreads();
  unsigned before = up_to - own;
  for (unsigned other = 0; other < warp; ++other) before += of_warps[other];
  for (unsigned group = first; group < end; ++group) {
    const unsigned count = totals[group];
    totals[group] = before;
    before += count;
  }
  __syncthreads();
}

template <class Index>
__device__ void place(const MoeOrderCall& call) {
  count_pairs<Index>(call);
  unsigned* counts = counts_of_warps();
  unsigned* totals = counts + kOrderWarps * call.groups;
  for (unsigned group = threadIdx.x; group < call.groups; group += blockDim.x) {
    unsigned before = 0, total = 0;
    if (gridDim.x > 1) {
#pragma unroll 8
      for (unsigned block = 0; block < gridDim.x; ++block) {
        const unsigned count = call.counts[(long long)block * call.groups + group];
        before += block < blockIdx.x ? count : 0;
        total += count;
      }
    }
    for (unsigned warp = 0; warp < kOrderWarps; ++warp) {
      unsigned& of_warp = counts[warp * call.groups + group];
      const unsigned count = of_warp;
      of_warp = before;
      before += count;
    }
    totals[group] = gridDim.x > 1 ? total : before;
  }
  __syncthreads();
  add_up_groups(totals, call.groups);
  if (blockIdx.x == 0) {
    for (unsigned expert = threadIdx.x; expert < call.groups - 1; expert += blockDim.x) {
      call.offsets[expert] = totals[expert + 1];
    }
  }
  visit_pairs<Index>(call, counts + threadIdx.x / 32 * call.groups,
                     [&](long long pair, unsigned group, unsigned before) {
                       const int position = totals[group] + before;
                       call.positions[pair] = group < call.groups - 1 ? position : ~position;
                     });
}

#define MOE_ORDER(name, Index)                                      \
  extern "C" __global__ void __launch_bounds__(kOrderWarps * 32)    \
      moe_count_##name(const __grid_constant__ MoeOrderCall call) { \
    count<Index>(call);                                             \
  }                                                                 \
  extern "C" __global__ void __launch_bounds__(kOrderWarps * 32)    \
      moe_place_##name(const __grid_constant__ MoeOrderCall call) { \
    place<Index>(call);                                             \
  }

MOE_ORDER(int, int)
MOE_ORDER(long, long long)
