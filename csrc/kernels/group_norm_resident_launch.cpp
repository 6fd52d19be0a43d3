#include "kernels/group_norm_launch.h"

#include <algorithm>

namespace cudnn_ops {
namespace {

constexpr int64_t kWarp = 32, kVectorBytes = 16;
constexpr int64_t kReserved = 1 << 10;  // bytes of shared memory of a block, for the system
// Of a multiprocessor: less is read twice in the time that the blocks wait for each other.
constexpr int64_t kLeastBytes = 40 << 10;
constexpr auto kPair = 2 * static_cast<int64_t>(sizeof(float));
// What column_sums.cuh declares.
constexpr auto kColumnSums = 32 * 33 * static_cast<int64_t>(sizeof(float));

// Bytes of shared memory of a block that waits for others, beside its pieces: for joining what its
// threads found, and behind that; and all but the first, with what its kernel declares.
struct ResidentRoom {
  int64_t scratch, behind, rest;
};

ResidentRoom forward_room(const GroupNormProblem& problem, int64_t threads, int64_t rows) {
  constexpr auto kMoments = 3 * static_cast<int64_t>(sizeof(float));
  const bool is_last = problem.is_channels_last;
  const int64_t parts = is_last ? rows * threads : threads / kWarp;
  const int64_t behind = kPair * (is_last ? problem.groups : problem.channels / problem.groups + 1);
  return {round_up(parts * kMoments, kPair), behind, behind};
}

ResidentRoom backward_room(const GroupNormProblem& problem, int64_t lanes) {
  const int64_t joined = problem.channels * (lanes / 2) * kPair;
  const int64_t behind = kPair * (problem.channels + problem.groups);
  return {round_up(joined, kVectorBytes), behind, behind + kColumnSums};
}

// Of groups' rows, a channel each, in parts of stretches; or of whole groups, any number of them.
std::optional<GroupNormLaunch> resident_rows_launch(const GroupNormProblem& problem,
                                                    const DeviceLimits& limits) {
  constexpr int64_t kWarps = 16, kTensors = 2, kAhead = kGroupNormAhead / kTensors;
  const int64_t channels = problem.channels / problem.groups, row = problem.steps();
  const int64_t units = problem.samples * problem.groups, processors = limits.processors;
  const int64_t parts = std::max<int64_t>(processors / units, 1);
  const int64_t stretch = divide_up(row, parts), blocks = units * divide_up(row, stretch);
  // Few multiprocessors would have nothing to do, also when the last blocks run.
  if (stretch < kWarp || 4 * blocks < 3 * round_up(blocks, processors)) return {};
  // Of the warps of a channel the number that leaves the fewest turns.
  int64_t warps = 0, turns = 0;
  for (int64_t some = 1; some <= kWarps; ++some) {
    const int64_t here = divide_up(channels, kWarps / some) * divide_up(stretch, some * kWarp);
    if (warps > 0 && here >= turns) continue;
    warps = some;
    turns = here;
  }
  constexpr int64_t kMostTurns = 1 << 15;  // which Rows divides
  const int64_t slots = std::min(kWarps / warps, channels), threads = slots * warps * kWarp;
  const int64_t rounds = divide_up(channels, slots);
  const int64_t scratch = round_up(rounds * slots * warps * kPair, kVectorBytes);
  const int64_t behind = kPair * (2 * channels + 1),
                piece = kTensors * threads * problem.piece_bytes();
  if (turns > kMostTurns || scratch + behind + kColumnSums > limits.shared_bytes) return {};
  const int64_t room = (limits.shared_bytes - scratch - behind - kColumnSums) / piece;
  GroupNormLaunch launch{};
  GroupNormSpread& spread = launch.spread;
  spread.streams = turns > room;
  if (spread.streams && room <= kAhead) return {};
  launch.threads = static_cast<int>(threads);
  spread.slots = static_cast<unsigned>(slots);
  spread.lanes = static_cast<unsigned>(warps * kWarp);
  spread.turns = static_cast<unsigned>(rounds);
  spread.stretch = static_cast<unsigned>(stretch);
  spread.stretches = static_cast<unsigned>(divide_up(row, stretch));
  spread.staying = static_cast<unsigned>(spread.streams ? room - kAhead : turns);
  spread.kept = static_cast<unsigned>(std::min(room, turns) * piece);
  spread.scratch = static_cast<unsigned>(scratch);
  launch.blocks = blocks;
  launch.shared_bytes = spread.kept + scratch + behind;
  return launch;
}

// Of the backward, which reads so many bytes: than the kernels of group_norm_backward.cu.
bool is_better(const GroupNormProblem& problem, const DeviceLimits& limits, int64_t bytes) {
  // Of a multiprocessor: three launches take longer than one barrier from there on.
  constexpr int64_t kLittleBytes = 8 << 10;
  if (!problem.may_be_whole) return false;
  const GroupNormLaunch other = group_norm_launch(problem, limits);
  if (!other.is_whole) return bytes >= kLittleBytes * limits.processors;
  // Where a multiprocessor has two blocks with whole groups, one reads while the other computes.
  const bool are_two = 2 * (other.shared_bytes + kReserved) <= limits.shared_bytes;
  return bytes >= kLeastBytes * limits.processors && (problem.is_channels_last || !are_two);
}

}  // namespace

std::optional<GroupNormLaunch> resident_launch(const GroupNormProblem& problem,
                                               const DeviceLimits& limits) {
  constexpr int kLeastVersion = 90;  // before it shared memory is smaller
  constexpr int64_t kManyRows = 4, kMostSteps = int64_t{1} << 31;
  const bool is_last = problem.is_channels_last, is_backward = problem.is_backward;
  const int64_t width = problem.width(), group_channels = problem.channels / problem.groups;
  const int64_t tensors = is_backward ? 2 : 1;
  const int64_t bytes =
      tensors * problem.samples * problem.channels * problem.positions * problem.number_bytes;
  if (limits.sm_version < kLeastVersion || width == 1) return {};
  if (is_backward && !is_better(problem, limits, bytes)) return {};
  if (!is_backward && bytes < kLeastBytes * limits.processors) return {};
  if (is_backward && !is_last) return resident_rows_launch(problem, limits);
  // Samples, or groups where channels are first, are cut into parts of so many steps.
  const int64_t units = is_last ? problem.samples : problem.samples * problem.groups;
  const int64_t parts = limits.processors / units, used = parts * units;
  const int64_t slots = is_last ? problem.channels / width : 1;
  const int64_t steps = is_last ? problem.positions : group_channels * (problem.positions / width);
  const int64_t rows = problem.piece_groups();
  // What does not stay in shared memory is read again by fewer threads, each with more under way.
  const bool stays = bytes <= used * limits.shared_bytes;
  const int64_t most_threads = is_backward || rows > kManyRows || !stays ? 512 : 1024;
  if (4 * used < 3 * limits.processors || slots > most_threads || steps > kMostSteps) return {};
  GroupNormLaunch launch{};
  GroupNormSpread& spread = launch.spread;
  const int64_t stretch = divide_up(steps, parts);
  const int64_t lanes = std::min(most_threads / slots, stretch);
  const int64_t threads = round_up(slots * lanes, kWarp), each = divide_up(stretch, lanes);
  const ResidentRoom others =
      is_backward ? backward_room(problem, lanes) : forward_room(problem, threads, rows);
  const int64_t piece = tensors * threads * problem.piece_bytes();
  const int64_t ahead = kGroupNormAhead / tensors;
  const int64_t room = (limits.shared_bytes - others.scratch - others.rest) / piece;
  spread.streams = each > room;
  // One block has its groups' numbers to itself.
  if (spread.streams ? room <= ahead : !is_last && parts == 1) return {};
  launch.threads = static_cast<int>(threads);
  spread.slots = static_cast<unsigned>(slots);
  spread.lanes = static_cast<unsigned>(lanes);
  spread.stretch = static_cast<unsigned>(stretch);
  spread.stretches = static_cast<unsigned>(divide_up(steps, stretch));
  spread.staying = static_cast<unsigned>(spread.streams ? room - ahead : each);
  spread.kept = static_cast<unsigned>(std::min(room, each) * piece);
  spread.scratch = static_cast<unsigned>(others.scratch);
  launch.blocks = units * spread.stretches;
  launch.shared_bytes = spread.kept + others.scratch + others.behind;
  return launch;
}

}  // namespace cudnn_ops
