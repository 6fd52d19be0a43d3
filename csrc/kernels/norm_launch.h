// Which kernels of norm_forward.cu and norm_backward.cu compute a norm of rows, and how they are
// launched. Depends on the problem and the GPU's limits alone, so that tests on any machine can
// check the launches of any GPU.
#pragma once

#include "kernels/device_kernel.h"

namespace cudnn_ops {

struct NormProblem {
  int64_t rows, columns;
  unsigned number_bytes;
  unsigned piece_bytes;  // what a thread can load at once: 16, 8 or one number's
};

// How a row is spread over threads, and rows over a block. A thread has `vectors` pieces; 0: a
// block loops over a row of any size.
struct NormSpread {
  unsigned bytes, vectors, group, threads;
};

struct NormForwardLaunch {
  NormSpread how;
  int64_t blocks;
  int threads;
};

NormForwardLaunch norm_forward_launch(const NormProblem& problem);

// How the backward spreads rows of so many pieces, of `bytes` each.
NormSpread norm_backward_spread(unsigned bytes, int64_t pieces);

struct NormBackwardProblem : NormProblem {
  bool needs_rows, needs_columns;  // the gradient of the input; those of weight and bias
};

enum class NormBackwardWay {
  kFew,     // one kernel for all gradients
  kSpread,  // rows through shared memory, `stages` of them under way
  kAny,     // rows of any size, from global memory
};

struct NormBackwardLaunch {
  NormBackwardWay way;
  NormSpread how;
  int64_t blocks;  // kSpread launches no more than are resident at the same time
  int threads;
  unsigned stages;
  unsigned row_bytes;  // the size of a row in shared memory, where it is copied whole
  int64_t shared_bytes;
  bool has_sums;  // the kernel sums the columns too; else another kernel does, with this grid:
  int64_t strips, stretches;
};

NormBackwardLaunch norm_backward_launch(const NormBackwardProblem& problem,
                                        const DeviceLimits& limits);

}  // namespace cudnn_ops
