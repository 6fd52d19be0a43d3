#include "kernels/norm_launch.h"

#include <algorithm>

namespace cudnn_ops {
namespace {

constexpr int64_t kWarp = 32;

constexpr NormSpread kAnyRows{0, 0, 0, 0};

NormSpread within_warp(unsigned bytes, unsigned vectors, int64_t pieces) {
  unsigned group = 1;
  while (group * vectors < pieces) group *= 2;
  return {bytes, vectors, group, 256};
}

NormSpread within_block(unsigned bytes, unsigned vectors, int64_t pieces) {
  const auto group = static_cast<unsigned>(divide_up(divide_up(pieces, vectors), kWarp) * kWarp);
  return {bytes, vectors, group, group};
}

// For pieces of fewer than 16 bytes.
NormSpread spread_small(unsigned bytes, int64_t pieces, unsigned most_threads) {
  const unsigned few = bytes == 8 ? 1 : 2, most = bytes == 8 ? 4 : 8;
  if (pieces <= few * kWarp) return within_warp(bytes, few, pieces);
  if (pieces <= most * kWarp) return within_warp(bytes, most, pieces);
  return pieces <= most * most_threads ? within_block(bytes, most, pieces) : kAnyRows;
}

// As many pieces per thread as leave enough threads: the sums over threads are a good part of the
// instructions, which limit the forward. Few rows are limited by latency, so each has more threads.
NormSpread spread_forward(unsigned bytes, int64_t pieces, int64_t rows) {
  if (bytes < 16) return spread_small(bytes, pieces, /*most_threads=*/1024);
  if (pieces <= 4 * kWarp) return within_warp(bytes, pieces <= 8 ? 2 : 4, pieces);
  constexpr int64_t kMost = 512, kFewRows = 512;
  // Within a warp they need no barrier.
  if (rows > kFewRows && pieces <= 5 * kWarp) return within_warp(bytes, 5, pieces);
  if (rows > kFewRows && pieces <= 6 * kWarp) return within_warp(bytes, 6, pieces);
  if (rows <= kFewRows && pieces <= 4 * kMost) return within_block(bytes, 2, pieces);
  if (pieces <= 4 * kMost) return within_block(bytes, 4, pieces);
  return pieces <= 8 * kMost ? within_block(bytes, 8, pieces) : kAnyRows;
}

int64_t pieces_of(const NormProblem& problem) {
  return problem.columns * problem.number_bytes / problem.piece_bytes;
}

// A thread's registers have no room for the sums of the columns.
bool is_wide(const NormSpread& how) {
  return how.bytes == 16 && how.vectors == 8;
}

// The size of a row that is copied whole, with its neighbours in the same 16 bytes.
unsigned whole_row_bytes(const NormProblem& problem) {
  constexpr int64_t kCopied = 16;
  return static_cast<unsigned>((divide_up(problem.columns * problem.number_bytes, kCopied) + 1) *
                               kCopied);
}

// The shared memory of the backward's pipeline, as in norm_backward.cu: the rows in flight, input
// and gradient of the output, and at the end the sums in their place. Rows of pieces that cp.async
// cannot copy are copied whole.
int64_t shared_bytes(const NormProblem& problem, const NormSpread& how, unsigned stages) {
  const int64_t stage = how.bytes < 4
                            ? int64_t{whole_row_bytes(problem)} * (how.threads / how.group)
                            : int64_t{how.vectors} * how.bytes * how.threads;
  const int64_t numbers = int64_t{how.vectors} * how.threads * (how.bytes / problem.number_bytes);
  return std::max<int64_t>(2 * stages * stage,
                           is_wide(how) ? 0 : numbers * static_cast<int64_t>(sizeof(float)));
}

// As many stages as fit into the GPU's shared memory; 0: none does. Kernels with fewer than three
// stages exist for the widest rows that have sums: these need more than GPUs other than Hopper and
// the largest Blackwell have.
unsigned stages_that_fit(const NormProblem& problem, const NormSpread& how, int64_t most_shared) {
  if (is_wide(how)) return shared_bytes(problem, how, 1) <= most_shared ? 1 : 0;
  const unsigned least = how.bytes == 16 && how.vectors == 4 ? 1 : 3;
  unsigned stages = 3;
  while (stages >= least && shared_bytes(problem, how, stages) > most_shared) --stages;
  return stages >= least ? stages : 0;
}

}  // namespace

// Few pieces per thread as long as a warp or a block holds the row, for more loads in flight.
NormSpread norm_backward_spread(unsigned bytes, int64_t pieces) {
  constexpr unsigned kMost = 512;
  if (bytes < 16) return spread_small(bytes, pieces, kMost);
  if (pieces <= kWarp) return within_warp(bytes, 1, pieces);
  if (pieces <= 2 * kWarp) return within_warp(bytes, 2, pieces);
  if (pieces <= 2 * kMost) return within_block(bytes, 2, pieces);
  if (pieces <= 4 * kMost) return within_block(bytes, 4, pieces);
  return pieces <= 8 * kMost ? within_block(bytes, 8, pieces) : kAnyRows;
}

NormForwardLaunch norm_forward_launch(const NormProblem& problem) {
  const NormSpread how = spread_forward(problem.piece_bytes, pieces_of(problem), problem.rows);
  if (how.vectors == 0) return {how, problem.rows, 1024};
  return {how, divide_up(problem.rows, how.threads / how.group), static_cast<int>(how.threads)};
}

NormBackwardLaunch norm_backward_launch(const NormBackwardProblem& problem,
                                        const DeviceLimits& limits) {
  // What the kernels declare themselves.
  constexpr int64_t kDeclared = 1 << 10;
  constexpr int kFewThreads = 512;
  NormBackwardLaunch launch{};
  launch.how = norm_backward_spread(problem.piece_bytes, pieces_of(problem));
  if (launch.how.vectors > 0) {
    launch.stages = stages_that_fit(problem, launch.how, limits.shared_bytes - kDeclared);
    if (launch.stages == 0) launch.how = kAnyRows;
  }
  const NormSpread& how = launch.how;
  const bool is_wide_piece = problem.piece_bytes == 16;
  // One kernel computes all gradients of few rows; the longer they are, the more of them.
  const int64_t few_rows = std::max<int64_t>(256, problem.columns * problem.number_bytes / 32);
  const bool is_block = how.group > kWarp || how.vectors == 0;
  if (problem.needs_columns && problem.needs_rows && problem.rows <= few_rows && is_block) {
    const int64_t numbers = is_wide_piece ? 4 / problem.number_bytes : 1;
    launch.way = NormBackwardWay::kFew;
    launch.strips = divide_up(problem.columns, kWarp * numbers);
    launch.blocks = launch.strips + problem.rows;
    launch.threads = kFewThreads;
    launch.has_sums = true;
    return launch;
  }
  if (how.vectors > 0) {
    // At least a few rows per block: with fewer, adding up the sums would take longer.
    constexpr int64_t kRows = 4;
    const int64_t turns = divide_up(problem.rows, how.threads / how.group);
    launch.way = NormBackwardWay::kSpread;
    launch.threads = static_cast<int>(how.threads);
    launch.row_bytes = whole_row_bytes(problem);
    launch.shared_bytes = shared_bytes(problem, how, launch.stages);
    launch.has_sums = !is_wide(how);
    launch.blocks = launch.has_sums
                        ? std::min(turns, std::max(limits.processors, divide_up(turns, kRows)))
                        : problem.rows;
  } else {
    launch.way = NormBackwardWay::kAny;
    launch.blocks = problem.rows;
    launch.threads = is_wide_piece ? 1024 : kFewThreads;
  }
  if (!launch.has_sums) {
    constexpr int64_t kBlocks = 512, kRows = 16;
    launch.strips = divide_up(
        pieces_of(problem) * problem.piece_bytes / (is_wide_piece ? 16 : problem.number_bytes),
        kWarp);
    launch.stretches = std::min(divide_up(problem.rows, kRows), divide_up(kBlocks, launch.strips));
  }
  return launch;
}

}  // namespace cudnn_ops
