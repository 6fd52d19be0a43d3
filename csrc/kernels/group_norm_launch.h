// Which kernels of group_norm_held.cu, group_norm_cluster.cu, group_norm_resident.cu,
// group_norm_forward.cu, and their like of the backward, compute a group norm, and how they are
// launched. Depends on the problem and the GPU's limits alone, so that tests on any machine can
// check the launches of any GPU.
#pragma once

#include "kernels/device_kernel.h"
#include "kernels/group_norm_call.h"

#include <optional>

namespace cudnn_ops {

inline int64_t round_up(int64_t number, int64_t to) {
  return divide_up(number, to) * to;
}

struct GroupNormProblem {
  int64_t samples, channels, groups, positions;  // none of them 0
  bool is_channels_last;
  unsigned number_bytes;
  unsigned aligned_bytes;  // of which every tensor begins at a multiple: 16, 8 or a number's
  bool is_backward;
  bool may_be_whole;  // not where sums of channels are all that is asked for

  // Of a piece: as many as are aligned, and divide what is innermost in memory.
  unsigned piece_bytes() const;
  int64_t width() const;
  int64_t steps() const;  // positions, of which those of a piece count as one
  // The most that a piece has some of: of one group where channels are first.
  int64_t piece_groups() const;
};

struct GroupNormLaunch {
  bool is_whole;  // one kernel, whose blocks have whole groups; else those in parts
  GroupNormSpread spread;
  int64_t blocks, shared_bytes;
  int threads;
};

// Of a kernel that holds groups in registers.
struct GroupNormHeldLaunch {
  GroupNormHold hold;
  unsigned piece_bytes;
  bool has_many;  // pieces a thread: up to 8 of them, of the backward's 4, else up to 2
  int64_t blocks, shared_bytes;
  int threads;
};

// None where groups are too large, or where blocks of several groups read memory better; and none
// of the backward where channels are last.
std::optional<GroupNormHeldLaunch> held_launch(const GroupNormProblem& problem,
                                               const DeviceLimits& limits);

// Of blocks that all run at once (group_norm_resident.cuh), a multiprocessor each. None where there
// is little to read, or many multiprocessors would have nothing to do. Of the backward, where
// channels are first, also of blocks that each have a whole group and do not wait.
std::optional<GroupNormLaunch> resident_launch(const GroupNormProblem& problem,
                                               const DeviceLimits& limits);

// Of a forward that adds nothing, by clusters of spread.stretches blocks. None where other kernels
// are as fast: those of held_launch() come behind this.
std::optional<GroupNormLaunch> cluster_launch(const GroupNormProblem& problem,
                                              const DeviceLimits& limits);

GroupNormLaunch group_norm_launch(const GroupNormProblem& problem, const DeviceLimits& limits);

}  // namespace cudnn_ops
