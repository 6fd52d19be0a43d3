// How the kernels of adaptive_norm_forward.cu and adaptive_norm_backward.cu are launched. Depends
// on the problem and the GPU's limits alone, so that tests on any machine can check the launches of
// any GPU.
#pragma once

#include "kernels/norm_launch.h"

namespace cudnn_ops {

struct AdaptiveNormProblem : NormProblem {
  int64_t tokens;       // rows of a sample
  bool is_gated;        // the backward reads the update too
  bool has_parameters;  // it adds up the gradients of weight and bias
};

struct AdaptiveNormForwardLaunch : NormForwardLaunch {
  bool is_ahead;       // by kernels that send for scale, shift and gate (adaptive_norm_ahead.cuh)
  unsigned row_bytes;  // what one of them takes in shared memory
  int64_t shared_bytes;
};

// `is_usual`: scale and shift are there, of the rows' type, and neither weight nor bias.
AdaptiveNormForwardLaunch adaptive_norm_forward_launch(const AdaptiveNormProblem& problem,
                                                       bool is_usual);

// The rows of all workers, `stretch` each (adaptive_norm.cuh).
struct AdaptiveNormShares {
  int64_t stretch, workers;
  bool has_parts;  // samples are not each one worker's
};

struct AdaptiveNormBackwardLaunch {
  NormSpread how;      // of no pieces: kernels for rows of any size
  bool is_single;      // by kernels for samples of one row, whose blocks come and go
  unsigned row_bytes;  // the size of a row in shared memory, where it is copied whole
  int64_t shared_bytes;
  AdaptiveNormShares blocks;  // of kernels whose blocks are workers (adaptive_norm_blocks.cuh); or
                              // none, and how many there are depends on what the GPU runs at once
};

AdaptiveNormBackwardLaunch adaptive_norm_backward_launch(const AdaptiveNormProblem& problem,
                                                         const DeviceLimits& limits);

// `at_once`: how many workers the GPU runs at the same time.
AdaptiveNormShares adaptive_norm_shares(const AdaptiveNormProblem& problem, int64_t at_once);

// Of the kernel that adds up the parts of samples: the threads that share a column's, a power of
// two, and the blocks for a sample.
struct AdaptiveNormTotals {
  int64_t split, strips;
};

AdaptiveNormTotals adaptive_norm_totals(const AdaptiveNormProblem& problem, int64_t stretch);

}  // namespace cudnn_ops
