// By which kernels of norm_forward.cu and norm_backward.cu a norm of rows is computed, and how they
// are launched: of the problem and the GPU's limits alone, so that it can be held against those of
// any GPU on any machine.
#pragma once

#include <cstdint>

namespace cudnn_ops {

struct NormProblem {
  int64_t rows, columns;
  unsigned number_bytes;
  unsigned piece_bytes;  // that a thread can load at once: 16, 8 or one number's
};

// How a row is spread over threads, and rows over a block. A thread has `vectors` pieces; 0: a
// block takes a row of any size, in turns.
struct NormSpread {
  unsigned bytes, vectors, group, threads;
};

struct NormForwardLaunch {
  NormSpread how;
  int64_t blocks;
  int threads;
};

NormForwardLaunch norm_forward_launch(const NormProblem& problem);

struct NormBackwardProblem : NormProblem {
  bool needs_rows, needs_columns;  // the gradient of the input; those of weight and bias
};

// What the launch depends on of a GPU.
struct NormLimits {
  int64_t shared_bytes;  // that a block can have, if it asks for them
  int64_t processors;
};

enum class NormBackwardWay {
  kFew,     // one kernel for all gradients
  kSpread,  // rows through shared memory, `stages` of them under way
  kAny,     // rows of any size, from global memory
};

struct NormBackwardLaunch {
  NormBackwardWay way;
  NormSpread how;
  int64_t blocks;  // of a spread's, unless fewer are resident at once
  int threads;
  unsigned stages;
  unsigned row_bytes;  // that a row takes in shared memory where it is copied whole
  int64_t shared_bytes;
  bool has_sums;  // the kernel adds up the columns too; else that is left to another:
  int64_t strips, stretches;
};

NormBackwardLaunch norm_backward_launch(const NormBackwardProblem& problem,
                                        const NormLimits& limits);

}  // namespace cudnn_ops
