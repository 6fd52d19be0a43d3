#include "kernels/adaptive_norm_launch.h"

#include <algorithm>
#include <bit>

namespace cudnn_ops {
namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kWide = 16;  // bytes of a piece

// Threads for rows of which each has `vectors` pieces, or all but the last one: a power of two that
// share a row, four warps of them in a block, or whole warps, which are a block.
NormSpread spread_over(unsigned bytes, unsigned vectors, int64_t pieces) {
  const auto least = static_cast<unsigned>(divide_up(pieces, vectors));
  if (least <= kWarp) return {bytes, vectors, std::bit_ceil(least), 4 * kWarp};
  const auto group = static_cast<unsigned>(divide_up(least, kWarp) * kWarp);
  return {bytes, vectors, group, group};
}

// As few threads without work as there can be, and of those that have as few one with four pieces
// each or nearly so. Every thread has all of its pieces but the last one.
NormSpread spread_together(unsigned bytes, int64_t pieces) {
  if (bytes != kWide) return spread_over(bytes, 8, pieces);
  NormSpread best{bytes, 0, 0, 0};
  for (const unsigned vectors : {4u, 5u, 3u}) {
    const NormSpread one = spread_over(bytes, vectors, pieces);
    if (divide_up(pieces, one.group) != vectors) continue;
    if (best.vectors == 0 || one.group * vectors < best.group * best.vectors) best = one;
  }
  return best;
}

}  // namespace

AdaptiveNormForwardLaunch adaptive_norm_forward_launch(const AdaptiveNormProblem& problem) {
  // Few rows have more threads each, and samples of fewer rows leave threads without one.
  constexpr int64_t kFewRows = 512, kTokens = 8, kMostThreads = 512;
  const int64_t pieces = problem.columns * problem.number_bytes / problem.piece_bytes;
  if (problem.rows > kFewRows && problem.tokens >= kTokens) {
    const NormSpread how = spread_together(problem.piece_bytes, pieces);
    if (how.vectors > 0 && how.threads <= kMostThreads) {
      const int64_t rows = how.bytes == kWide ? 2 : 4;  // as in adaptive_norm_forward.cu
      const int64_t turns = problem.rows / problem.tokens * divide_up(problem.tokens, rows);
      return {how, divide_up(turns, how.threads / how.group), static_cast<int>(how.threads), true};
    }
  }
  const NormForwardLaunch alone = norm_forward_launch(problem);
  return {alone.how, alone.blocks, alone.threads, false};
}

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
