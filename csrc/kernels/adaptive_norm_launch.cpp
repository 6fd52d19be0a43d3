#include "kernels/adaptive_norm_launch.h"

#include <algorithm>

namespace cudnn_ops {

AdaptiveNormBackwardLaunch adaptive_norm_backward_launch(const AdaptiveNormProblem& problem,
                                                         const DeviceLimits& limits) {
  constexpr unsigned kPiece = 16;
  constexpr AdaptiveNormBackwardLaunch kAny{{0, 0, 0, 0}, 0};
  if (problem.piece_bytes != kPiece) return kAny;
  const NormSpread how =
      norm_backward_spread(kPiece, problem.columns * problem.number_bytes / kPiece);
  constexpr unsigned kMostVectors = 4;  // there are kernels for
  if (how.vectors == 0 || how.vectors > kMostVectors) return kAny;
  // As in adaptive_norm_backward.cu: the rows under way of input, gradient and update. What the
  // kernels declare themselves comes beside it.
  constexpr int64_t kDeclared = 1 << 10;
  const int64_t stages = how.vectors == kMostVectors ? 2 : 3, tensors = problem.is_gated ? 3 : 2;
  const int64_t bytes = stages * tensors * how.vectors * kPiece * how.threads;
  if (bytes > limits.shared_bytes - kDeclared) return kAny;
  return {how, bytes};
}

AdaptiveNormShares adaptive_norm_shares(const AdaptiveNormProblem& problem, int64_t at_once) {
  // At least a few rows each: with fewer, adding up their sums would take longer.
  constexpr int64_t kRows = 4;
  int64_t stretch = std::max(divide_up(problem.rows, at_once), std::min(kRows, problem.rows));
  // Whole samples, where that makes no share much larger: nothing is left to add up then.
  constexpr int64_t kSamples = 8;
  if (stretch >= kSamples * problem.tokens || problem.tokens == 1) {
    stretch = divide_up(stretch, problem.tokens) * problem.tokens;
  }
  const int64_t workers = divide_up(problem.rows, stretch);
  return {stretch, workers, stretch % problem.tokens != 0 && problem.tokens > 1};
}

}  // namespace cudnn_ops
