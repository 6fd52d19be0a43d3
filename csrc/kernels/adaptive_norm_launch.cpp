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
constexpr unsigned kNarrowStages = 3;        // of rows of a piece or two a lane

constexpr AdaptiveNormBackwardLaunch kAny{{0, 0, 0, 0}, false, 0, 0, {}};

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

// By kernels for samples of a single row (adaptive_norm_single.cuh), where there is one for it.
AdaptiveNormBackwardLaunch single_launch(const AdaptiveNormProblem& problem, int64_t pieces,
                                         int64_t most_shared) {
  constexpr unsigned kMost = 320;  // the kernel of two pieces takes
  constexpr unsigned kWide = 4, kMostWide = 512;
  const int64_t tensors = problem.is_gated ? 6 : 3;
  if (problem.piece_bytes != kPiece) {
    const unsigned group = whole_warps(problem.columns, kAdaptiveNormSingle);
    if (group > kMostWide) return kAny;
    return {{problem.piece_bytes, kAdaptiveNormSingle, group, group}, true, 0, 0, {}};
  }
  NormSpread how = norm_backward_spread(kPiece, pieces);
  if (pieces > 2 * kWarp) {
    const unsigned vectors = whole_warps(pieces, 2) <= kMost ? 2 : kWide;
    const unsigned group = whole_warps(pieces, vectors);
    if (group > kMostWide) return kAny;
    how = {kPiece, vectors, group, group};
  }
  const int64_t bytes = tensors * how.vectors * kPiece * how.threads;
  return bytes <= most_shared ? AdaptiveNormBackwardLaunch{how, true, 0, bytes, {}} : kAny;
}

// As in adaptive_norm_backward.cu: the rows under way of input and gradient, where there is a gate
// of update and the sum's gradient too; and what columns are multiplied by, where registers do not
// keep it. The kernel for the widest rows of gated sums reads that and the sum's gradient where
// they lie.
int64_t shared_bytes(const AdaptiveNormProblem& problem, const Way& way) {
  const NormSpread& how = way.how;
  const bool is_widest = problem.is_gated && how.bytes == kPiece && how.vectors == 4;
  const int64_t tensors = is_widest ? 3 : problem.is_gated ? 4 : 2;
  const int64_t row = int64_t{how.vectors} * how.bytes * how.threads;
  const int64_t numbers = int64_t{how.vectors} * (how.bytes / problem.number_bytes);
  const bool is_shared = numbers > kAdaptiveNormKept && !is_widest;
  const int64_t factors = is_shared ? numbers * static_cast<int64_t>(sizeof(float)) : 0;
  return way.stages * tensors * row + factors * how.threads;
}

// The tile that takes the fewest instructions for a row: those for each piece that a thread might
// have, be it there or not, and in each warp those around, most of which add up the row's sums. Or
// that by which one row takes the least time, with the fewest pieces a thread.
Way best_way(const AdaptiveNormProblem& problem, int64_t pieces, bool has_few_rows,
             int64_t most_shared) {
  Way best{};
  int64_t least = 0;
  const auto consider = [&](const Tile& tile) {
    constexpr int64_t kOfPiece = 5, kAround = 6;  // in units of some 20
    const Way way{spread_over(tile, pieces), tile.stages};
    const int64_t warps = has_few_rows ? 1 : way.how.group / kWarp;
    const int64_t cost = warps * (kOfPiece * way.how.vectors + kAround);
    if (way.how.group > tile.most_threads || shared_bytes(problem, way) > most_shared) return;
    if (best.how.vectors > 0 && cost >= least) return;
    best = way;
    least = cost;
  };
  if (!problem.is_gated) {
    for (const auto& tile : kTiles) consider(tile);
    return best;
  }
  for (const auto& tile : kGatedTiles) consider(tile);
  if (best.how.vectors == 0) consider(kWidestGatedTile);
  return best;
}

// A worker has at least a few of the rows: with fewer, adding up their sums would take longer; and
// some more of them as long as a quarter of the workers is there.
constexpr int64_t kFewRows = 4, kSomeRows = 8;

// So few that a multiprocessor has hardly more than one worker.
bool has_few_rows(const AdaptiveNormProblem& problem, const DeviceLimits& limits) {
  return problem.rows <= kSomeRows * limits.processors;
}

// A kernel for rows that no pieces of 16 bytes fit, as adaptive_norm_backward.cu declares it.
struct OddTile {
  unsigned numbers, most_threads, stages;
};

constexpr unsigned kFewNumbers = 8, kManyNumbers = 32;  // of a thread
constexpr int64_t kMostOfWarp = kManyNumbers * kWarp;

OddTile odd_tile(const AdaptiveNormProblem& problem, bool has_few_rows) {
  constexpr unsigned kMostThreads = 512;
  // A row that a warp has with many numbers each is one of a block's, which are worked on together.
  const bool is_short = has_few_rows && problem.columns > kMostOfWarp;
  if (problem.columns <= kFewNumbers * (is_short ? kMostThreads : kWarp)) {
    return {kFewNumbers, kMostThreads, 3};
  }
  return problem.is_gated ? OddTile{kManyNumbers, 384, 2} : OddTile{kManyNumbers, kMostThreads, 3};
}

// As in adaptive_norm_odd.cuh: what columns are multiplied by, and behind it the rows on their way
// or in their place the sums of each group.
int64_t odd_shared_bytes(const AdaptiveNormProblem& problem, unsigned stages, int64_t groups,
                         int64_t row_bytes) {
  const int64_t tensors = problem.is_gated ? 4 : 2, kinds = problem.is_gated ? 3 : 2;
  const int64_t numbers = (row_bytes - kPiece) / problem.number_bytes * int64_t{sizeof(float)};
  return (problem.is_gated ? 2 : 1) * numbers +
         groups * std::max(stages * tensors * row_bytes, kinds * numbers);
}

// No more groups than a sample has rows, for those of a block have one at a time.
AdaptiveNormBackwardLaunch odd_launch(const AdaptiveNormProblem& problem, bool has_few_rows,
                                      int64_t most_shared) {
  const OddTile tile = odd_tile(problem, has_few_rows);
  unsigned group = 1;
  while (group < kWarp && group * tile.numbers < problem.columns) group *= 2;
  // Threads with many numbers share a row by whole warps.
  if (group == kWarp || tile.numbers == kManyNumbers) {
    group = whole_warps(problem.columns, tile.numbers);
  }
  const int64_t together = int64_t{kAdaptiveNormTogether} * group;
  const int64_t padded = divide_up(problem.columns, together) * together * problem.number_bytes;
  const int64_t row_bytes = (divide_up(padded, kPiece) + 1) * kPiece;
  const unsigned in_warp = std::max(kWarp / group, 1U);
  const int64_t most = std::max<int64_t>(divide_up(problem.tokens, in_warp) * in_warp, in_warp);
  auto groups =
      static_cast<unsigned>(group > kWarp ? 1 : std::min<int64_t>(tile.most_threads / group, most));
  const auto shared = [&] { return odd_shared_bytes(problem, tile.stages, groups, row_bytes); };
  while (groups > in_warp && shared() > most_shared) groups -= in_warp;
  if (group > tile.most_threads || shared() > most_shared) return kAny;
  return {{problem.piece_bytes, tile.numbers, group, groups * group},
          false,
          static_cast<unsigned>(row_bytes),
          shared(),
          {}};
}

// A block for each multiprocessor; and where that makes no share much larger, whole samples or
// equal parts of them: no block has to add up its groups' sums twice then.
AdaptiveNormShares shares_of_blocks(const AdaptiveNormProblem& problem, int64_t processors) {
  constexpr int64_t kEighths = 8;
  const int64_t tokens = problem.tokens;
  int64_t stretch = std::max(divide_up(problem.rows, processors), kFewRows);
  const int64_t even =
      stretch < tokens ? divide_up(tokens, tokens / stretch) : divide_up(stretch, tokens) * tokens;
  const bool is_even = tokens % even == 0 || even % tokens == 0;
  if (is_even && kEighths * even <= (kEighths + 1) * stretch) stretch = even;
  return {stretch, divide_up(problem.rows, stretch), stretch % tokens != 0};
}

// By kernels whose blocks are workers, for what these were measured to be faster at.
AdaptiveNormBackwardLaunch blocks_launch(const AdaptiveNormProblem& problem, int64_t pieces,
                                         const DeviceLimits& limits, int64_t most_shared) {
  constexpr int kHopper = 90;
  constexpr unsigned kVectors = 2, kMost = 512, kHalf = 2;
  constexpr int64_t kRows = 512, kTokens = 64;
  const bool is_for = limits.sm_version >= kHopper && problem.number_bytes == kHalf &&
                      !problem.has_parameters && problem.rows >= kRows &&
                      problem.tokens >= kTokens && pieces > kWarp && pieces <= kVectors * kMost;
  if (!is_for) return kAny;
  // As in the kernels: rows under way, and what columns are multiplied by.
  const int64_t stages = problem.is_gated ? 2 : 3, tensors = problem.is_gated ? 4 : 2;
  const int64_t kinds = problem.is_gated ? 2 : 1;
  const unsigned group = whole_warps(pieces, kVectors);
  const int64_t room = int64_t{kVectors} * group * kPiece;  // of a row
  const int64_t floats = room / kHalf * static_cast<int64_t>(sizeof(float));
  const auto shared = [&](int64_t groups) {
    return stages * tensors * groups * room + kinds * floats;
  };
  const auto shares = shares_of_blocks(problem, limits.processors);
  auto groups = static_cast<unsigned>(std::min<int64_t>(kMost / group, shares.stretch));
  while (groups > 1 && shared(groups) > most_shared) --groups;
  if (shared(groups) > most_shared) return kAny;
  // A multiprocessor runs one block. One of a single group gains where it has many rows, and
  // nearly all threads or the tensors of a gated sum to read.
  constexpr unsigned kNearlyAll = 448;
  const bool is_busy = problem.is_gated || group >= kNearlyAll;
  if (groups == 1 && (!is_busy || has_few_rows(problem, limits))) return kAny;
  return {{kPiece, kVectors, group, groups * group}, false, 0, shared(groups), shares};
}

}  // namespace

AdaptiveNormForwardLaunch adaptive_norm_forward_launch(const AdaptiveNormProblem& problem,
                                                       bool is_usual) {
  AdaptiveNormForwardLaunch launch{norm_forward_launch(problem), false, 0, 0};
  const NormSpread& how = launch.how;
  if (!is_usual || how.bytes != kPiece || how.vectors == 0) return launch;
  const unsigned of_block = how.threads / how.group;
  // Most rows of a block are of its first row's sample; rows that only warps have the room for have
  // no other kernel.
  const bool is_of_few = how.vectors == 4 && how.group <= kWarp && problem.tokens >= of_block;
  launch.is_ahead = is_of_few || how.vectors == 5 || how.vectors == 6;
  if (launch.is_ahead) {
    launch.row_bytes = static_cast<unsigned>(problem.columns * problem.number_bytes);
    launch.shared_bytes = int64_t{launch.row_bytes} * (problem.is_gated ? 3 : 2);
    if (problem.is_gated) launch.shared_bytes += int64_t{how.vectors} * kPiece * how.threads;
  }
  return launch;
}

AdaptiveNormBackwardLaunch adaptive_norm_backward_launch(const AdaptiveNormProblem& problem,
                                                         const DeviceLimits& limits) {
  constexpr int64_t kDeclared = 1 << 10;  // what the kernels declare themselves
  const int64_t pieces = problem.columns * problem.number_bytes / problem.piece_bytes;
  const int64_t most_shared = limits.shared_bytes - kDeclared;
  const bool is_wide = problem.piece_bytes == kPiece;
  if (problem.tokens == 1 && !problem.has_parameters) {
    const auto launch = single_launch(problem, pieces, most_shared);
    if (launch.how.vectors > 0) return launch;
  }
  if (!is_wide) return odd_launch(problem, has_few_rows(problem, limits), most_shared);
  const auto blocks = blocks_launch(problem, pieces, limits, most_shared);
  if (blocks.how.vectors > 0) return blocks;
  const Way way = pieces > kWarp
                      ? best_way(problem, pieces, has_few_rows(problem, limits), most_shared)
                      : Way{norm_backward_spread(problem.piece_bytes, pieces), kNarrowStages};
  if (way.how.vectors == 0) return kAny;
  const int64_t bytes = shared_bytes(problem, way);
  if (bytes > most_shared) return kAny;
  return {way.how, false, 0, bytes, {}};
}

AdaptiveNormShares adaptive_norm_shares(const AdaptiveNormProblem& problem, int64_t at_once) {
  const int64_t some = std::min(kSomeRows, divide_up(4 * problem.rows, at_once));
  int64_t stretch =
      std::max({divide_up(problem.rows, at_once), some, std::min(kFewRows, problem.rows)});
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
