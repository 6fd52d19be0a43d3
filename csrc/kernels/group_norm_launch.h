// Which kernels of group_norm_forward.cu and group_norm_backward.cu compute a group norm, and how
// they are launched. Depends on the problem and the GPU's limits alone, so that tests on any
// machine can check the launches of any GPU.
#pragma once

#include "kernels/device_kernel.h"
#include "kernels/group_norm_call.h"

namespace cudnn_ops {

struct GroupNormProblem {
  int64_t samples, channels, groups, positions;  // none of them 0
  bool is_channels_last;
  unsigned number_bytes;
  bool has_pieces;  // all tensors begin at multiples of 16 bytes
  bool is_backward;
  bool may_be_whole;  // not where sums of channels are all that is asked for

  // Numbers of a piece: 16 bytes of them, or one.
  int64_t width() const;
};

struct GroupNormLaunch {
  bool is_whole;  // one kernel, whose blocks have whole groups; else those in parts
  GroupNormSpread spread;
  int64_t blocks, shared_bytes;
  int threads;
};

GroupNormLaunch group_norm_launch(const GroupNormProblem& problem, const DeviceLimits& limits);

}  // namespace cudnn_ops
