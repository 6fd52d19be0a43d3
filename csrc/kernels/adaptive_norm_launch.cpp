#include "kernels/adaptive_norm_launch.h"

#include "kernels/adaptive_norm_call.h"

#include <algorithm>
#include <array>

namespace cudnn_ops {
namespace {

constexpr unsigned kPiece = 16, kWarp = 32;

// A kernel for rows of 16-byte pieces, as adaptive_norm_backward.cu declares it. Those of five
// pieces are for rows that a warp has.
struct Tile {
  unsigned vectors, most_threads, stages;
};

constexpr std::array<Tile, 5> kTiles = {
    {{1, 256, 3}, {2, 384, 3}, {3, 320, 2}, {4, 512, 2}, {5, kWarp, 2}}};
constexpr std::array<Tile, 3> kGatedTiles = {{{1, 256, 3}, {2, 320, 2}, {3, 512, 2}}};
constexpr Tile kWidestGatedTile{4, 512, 2};  // for rows that these have no room for: slower
constexpr unsigned kMostStages = 3;          // of rows of a piece a lane, and odd ones

unsigned whole_warps(int64_t pieces, unsigned vectors) {
  return static_cast<unsigned>(divide_up(divide_up(pieces, vectors), kWarp) * kWarp);
}

// Rows of a warp each have more than one in a block, for a multiprocessor has few blocks.
NormSpread spread_over(const Tile& tile, int64_t pieces) {
  const unsigned group = whole_warps(pieces, tile.vectors);
  return {kPiece, tile.vectors, group, std::max(group, 2 * kWarp)};
}

struct Way {
  NormSpread how;
  unsigned stages;
};

NormSpread single_spread(int64_t pieces) {
  constexpr unsigned kMost = 320;  // the kernel of two pieces takes
  constexpr unsigned kWide = 4, kMostWide = 512;
  if (pieces <= 2 * kWarp) return norm_backward_spread(kPiece, pieces);
  const unsigned vectors = whole_warps(pieces, 2) <= kMost ? 2 : kWide;
  const unsigned group = whole_warps(pieces, vectors);
  if (group > kMostWide) return {0, 0, 0, 0};
  return {kPiece, vectors, group, group};
}

int64_t row_bytes(const AdaptiveNormProblem& problem) {
  constexpr int64_t kCopied = 16;
  return (divide_up(problem.columns * problem.number_bytes, kCopied) + 1) * kCopied;
}

// As in adaptive_norm_backward.cu: the rows under way of input and gradient, where there is a gate
// of update and the sum's gradient too; and what columns are multiplied by, where registers do not
// keep it. The kernel for the widest rows of gated sums reads that and the sum's gradient where
// they lie.
int64_t shared_bytes(const AdaptiveNormProblem& problem, const Way& way) {
  const NormSpread& how = way.how;
  const bool is_widest = problem.is_gated && how.bytes == kPiece && how.vectors == 4;
  const int64_t tensors = is_widest ? 3 : problem.is_gated ? 4 : 2;
  const int64_t row = how.bytes < 4 ? row_bytes(problem) * (how.threads / how.group)
                                    : int64_t{how.vectors} * how.bytes * how.threads;
  const int64_t numbers = int64_t{how.vectors} * (how.bytes / problem.number_bytes);
  const bool is_shared = numbers > kAdaptiveNormKept && !is_widest;
  const int64_t factors = is_shared ? numbers * static_cast<int64_t>(sizeof(float)) : 0;
  return way.stages * tensors * row + factors * how.threads;
}

// The tile that takes the fewest instructions for a row: those for each piece that a thread might
// have, be it there or not, and in each warp those around, most of which add up the row's sums.
Way best_way(const AdaptiveNormProblem& problem, int64_t pieces, int64_t most_shared) {
  Way best{};
  int64_t least = 0;
  const auto consider = [&](const Tile& tile) {
    constexpr int64_t kOfPiece = 5, kAround = 6;  // in units of some 20
    const Way way{spread_over(tile, pieces), tile.stages};
    const int64_t instructions = way.how.group / kWarp * (kOfPiece * way.how.vectors + kAround);
    if (way.how.group > tile.most_threads || shared_bytes(problem, way) > most_shared) return;
    if (best.how.vectors > 0 && instructions >= least) return;
    best = way;
    least = instructions;
  };
  if (!problem.is_gated) {
    for (const auto& tile : kTiles) consider(tile);
    return best;
  }
  for (const auto& tile : kGatedTiles) consider(tile);
  if (best.how.vectors == 0) consider(kWidestGatedTile);
  return best;
}

}  // namespace

AdaptiveNormBackwardLaunch adaptive_norm_backward_launch(const AdaptiveNormProblem& problem,
                                                         const DeviceLimits& limits) {
  constexpr AdaptiveNormBackwardLaunch kAny{{0, 0, 0, 0}, false, 0, 0};
  constexpr int64_t kDeclared = 1 << 10;  // what the kernels declare themselves
  const int64_t pieces = problem.columns * problem.number_bytes / problem.piece_bytes;
  const int64_t most_shared = limits.shared_bytes - kDeclared;
  const bool is_wide = problem.piece_bytes == kPiece;
  if (is_wide && problem.tokens == 1 && !problem.has_parameters) {
    const NormSpread how = single_spread(pieces);
    if (how.vectors > 0) return {how, true, 0, 0};
  }
  const Way way = is_wide && pieces > kWarp
                      ? best_way(problem, pieces, most_shared)
                      : Way{norm_backward_spread(problem.piece_bytes, pieces), kMostStages};
  if (way.how.vectors == 0) return kAny;
  const int64_t bytes = shared_bytes(problem, way);
  if (bytes > most_shared) return kAny;
  return {way.how, false, static_cast<unsigned>(row_bytes(problem)), bytes};
}

AdaptiveNormShares adaptive_norm_shares(const AdaptiveNormProblem& problem, int64_t at_once) {
  // At least a few rows each: with fewer, adding up their sums would take longer; and some more of
  // them as long as a quarter of the workers is there.
  constexpr int64_t kRows = 4, kSome = 8;
  const int64_t some = std::min(kSome, divide_up(4 * problem.rows, at_once));
  int64_t stretch =
      std::max({divide_up(problem.rows, at_once), some, std::min(kRows, problem.rows)});
  // Whole samples, where that makes no share much larger: nothing is left to add up then.
  constexpr int64_t kSamples = 8;
  if (stretch >= kSamples * problem.tokens || problem.tokens == 1) {
    stretch = divide_up(stretch, problem.tokens) * problem.tokens;
  }
  const int64_t workers = divide_up(problem.rows, stretch);
  return {stretch, workers, stretch % problem.tokens != 0 && problem.tokens > 1};
}

AdaptiveNormTotals adaptive_norm_totals(const AdaptiveNormProblem& problem, int64_t stretch) {
  constexpr int64_t kParts = 4, kMost = kAdaptiveNormTotalsThreads / kWarp;
  // A thread asks for so many parts at once.
  int64_t split = 1;
  while (split < kMost && split * kParts < divide_up(problem.tokens, stretch) + 1) split *= 2;
  return {split, divide_up(problem.columns, kAdaptiveNormTotalsThreads / split)};
}

}  // namespace cudnn_ops
