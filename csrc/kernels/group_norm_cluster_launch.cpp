#include "kernels/group_norm_launch.h"

#include <algorithm>
#include <numeric>

namespace cudnn_ops {
namespace {

constexpr int64_t kWarp = 32, kSector = 32, kThreads = 512;
constexpr int64_t kReserved = 1 << 10;  // bytes of shared memory of a block, for the system
// Of a block's pieces: registers hold less as well.
constexpr int64_t kLeastKept = 48 << 10;
constexpr auto kPair = 2 * static_cast<int64_t>(sizeof(float));

// How many blocks of a launch have room on a multiprocessor, as far as more than four matter.
int64_t blocks_of_processor(const GroupNormLaunch& launch, const DeviceLimits& limits) {
  constexpr int64_t kMost = 4;
  return std::min((limits.shared_bytes + kReserved) / (launch.shared_bytes + kReserved), kMost);
}

// Units, of which a sample has so many, in clusters of so many blocks of about `threads`; none
// where these are too few.
std::optional<GroupNormLaunch> launch_of(const GroupNormProblem& problem, int64_t strips,
                                         int64_t parts, int64_t threads) {
  constexpr int64_t kRows = 8, kMostStages = 8;
  const bool is_last = problem.is_channels_last;
  const int64_t groups = problem.groups / strips;
  const int64_t group_channels = problem.channels / problem.groups;
  const int64_t slots = is_last ? groups * group_channels / problem.width() : 1;
  const int64_t steps = (is_last ? 1 : group_channels) * problem.steps();
  const int64_t stretch = divide_up(steps, parts), classes = slots / std::gcd(slots, kRows);
  const int64_t lanes = std::min(threads / slots, stretch);
  const int64_t warps = divide_up(slots * lanes, kWarp);
  if (warps < classes || divide_up(steps, stretch) != parts) return {};
  const int64_t turns = divide_up(stretch, lanes), stage = divide_up(turns, kMostStages);
  const int64_t stages = divide_up(turns, stage), kept = stretch * slots * problem.piece_bytes();
  GroupNormLaunch launch{};
  GroupNormSpread& spread = launch.spread;
  spread.slots = static_cast<unsigned>(slots);
  spread.lanes = static_cast<unsigned>(lanes);
  spread.turns = static_cast<unsigned>(stage);
  spread.strips = static_cast<unsigned>(strips);
  spread.stretches = static_cast<unsigned>(parts);
  spread.stretch = static_cast<unsigned>(stretch);
  spread.kept = static_cast<unsigned>(kept);
  spread.classes = static_cast<unsigned>(classes);
  spread.shares = static_cast<unsigned>(warps / classes);
  spread.stages = static_cast<unsigned>(stages);
  launch.threads = static_cast<int>(warps * kWarp);
  launch.blocks = problem.samples * strips * parts;
  // Behind the pieces what RoomOf has there.
  const int64_t parameters = is_last ? 0 : group_channels;
  launch.shared_bytes =
      kept + problem.piece_bytes() + kPair * (2 * kRows * warps + stages + 2 * groups + parameters);
  return launch;
}

// With as many threads as leave registers for all blocks of a multiprocessor, which are two or
// more: so that one reads while another computes.
std::optional<GroupNormLaunch> shared_launch(const GroupNormProblem& problem,
                                             const DeviceLimits& limits, int64_t strips,
                                             int64_t parts) {
  constexpr int64_t kMostThreads = 1024;
  const auto launch = launch_of(problem, strips, parts, kThreads);
  if (!launch || blocks_of_processor(*launch, limits) < 2) return {};
  const int64_t blocks = blocks_of_processor(*launch, limits);
  const bool is_alone = launch->blocks <= limits.processors && launch->spread.kept >= 24 << 10;
  if (is_alone || blocks == 2) return launch;
  return launch_of(problem, strips, parts, kMostThreads / blocks / kWarp * kWarp);
}

// Groups where channels are first, of which a block, or few blocks, have one.
std::optional<GroupNormLaunch> rows_launch(const GroupNormProblem& problem,
                                           const DeviceLimits& limits) {
  constexpr int64_t kHeld = 128 << 10;  // what a block holds in registers
  const int64_t units = problem.samples * problem.groups;
  const int64_t bytes = problem.channels / problem.groups * problem.positions * 2;
  if (bytes < kLeastKept) return {};
  if (units > limits.processors) {
    return shared_launch(problem, limits, problem.groups, bytes > kHeld ? 2 : 1);
  }
  if (bytes > kHeld || 2 * units > limits.processors) return {};
  return shared_launch(problem, limits, problem.groups, 4 * units > limits.processors ? 2 : 4);
}

// Whether a sample's groups may be shared out so where channels are last: in whole pieces, of which
// those of a position are some sectors of memory.
bool are_whole(const GroupNormProblem& problem, int64_t strips) {
  const int64_t channels = problem.channels / strips;
  return problem.groups % strips == 0 && channels % problem.width() == 0 &&
         (strips == 1 || channels * problem.number_bytes >= 2 * kSector);
}

// Where channels are last and a group's are less than a sector of memory, which other kernels read
// badly: a block has whole groups, and where not all of a sample, all blocks run at once.
std::optional<GroupNormLaunch> narrow_launch(const GroupNormProblem& problem,
                                             const DeviceLimits& limits) {
  const int64_t processors = limits.processors;
  for (int64_t strips = 1; strips <= problem.groups; ++strips) {
    if (!are_whole(problem, strips)) continue;
    const auto launch = shared_launch(problem, limits, strips, 1);
    if (!launch || 4 * launch->blocks < 3 * processors) continue;
    const bool is_usual = strips == 1 || launch->blocks <= 2 * processors;
    return is_usual && launch->spread.kept >= kLeastKept ? launch : std::nullopt;
  }
  return {};
}

// Where channels are last and there are few groups, large ones, by as many blocks as there are
// multiprocessors at most.
std::optional<GroupNormLaunch> few_launch(const GroupNormProblem& problem,
                                          const DeviceLimits& limits) {
  constexpr int64_t kParts = 8, kLarge = 64 << 10, kMostBytes = 40 << 10;
  const int64_t group_channels = problem.channels / problem.groups;
  const int64_t units = problem.samples * problem.groups;
  const int64_t bytes = group_channels * problem.positions * problem.number_bytes;
  const bool is_narrow = group_channels * problem.number_bytes < kSector;
  if ((is_narrow ? 2 : 4) * units > limits.processors || bytes < kLarge ||
      units * bytes >= kMostBytes * limits.processors) {
    return {};
  }
  for (int64_t strips = problem.groups; strips > 0; --strips) {
    if (!are_whole(problem, strips)) continue;
    if (problem.channels / strips * problem.number_bytes % kSector != 0) continue;
    const auto launch = launch_of(problem, strips, kParts, kThreads);
    if (!launch || launch->blocks > limits.processors) continue;
    return blocks_of_processor(*launch, limits) >= 2 ? launch : std::nullopt;
  }
  return {};
}

}  // namespace

std::optional<GroupNormLaunch> cluster_launch(const GroupNormProblem& problem,
                                              const DeviceLimits& limits) {
  constexpr int kLeastVersion = 90;
  const bool is_last = problem.is_channels_last;
  if (limits.sm_version < kLeastVersion || problem.is_backward || problem.number_bytes != 2 ||
      problem.piece_bytes() != 16 || problem.piece_groups() > 2) {
    return {};
  }
  if (!is_last) return rows_launch(problem, limits);
  const int64_t group_channels = problem.channels / problem.groups;
  if (group_channels * problem.number_bytes < kSector) {
    if (const auto launch = narrow_launch(problem, limits)) return launch;
  }
  return few_launch(problem, limits);
}

}  // namespace cudnn_ops
