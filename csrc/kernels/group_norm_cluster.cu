// Group norm that reads its numbers once, by clusters of few blocks which each have some of a
// sample's groups, for float16 and bfloat16. Compiled as group_norm_forward.cu is.
//
// Blocks of a cluster show each other what they find, so that no block waits for those of another
// cluster: while one computes, a second one on the same multiprocessor reads.

#include "group_norm_lines.cuh"

namespace {

template <int kBytes, bool kIsLast>
__device__ void cluster(const GroupNormCall& call) {
  const PartOf<kIsLast> part(call, cluster_of_block(), block_of_cluster());
  const RoomOf room(call.spread, part.groups());
  send_for_all(part, room);
  LinesOf<kIsLast> lines;
  lines.load(part, room);
  add_up_rows(part, room);
  find_own(part, room);
  meet_in_cluster();
  const bool is_far = find_stats(part, room);
  arrive_in_cluster();
  normalize(part, room, is_far, lines);
  // Nobody reads this block's shared memory any more.
  wait_in_cluster();
}

}  // namespace

GROUP_NORM(cluster, 16, 512, 2)
