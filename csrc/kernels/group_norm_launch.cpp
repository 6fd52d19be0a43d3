#include "kernels/group_norm_launch.h"

#include <algorithm>

namespace cudnn_ops {
namespace {

constexpr int64_t kWarp = 32, kVectorBytes = 16, kSector = 32;
constexpr int64_t kReserved = 1 << 10;  // bytes of shared memory of a block, for the system
constexpr auto kPair = 2 * static_cast<int64_t>(sizeof(float));

// The channels of a slot.
int64_t slot_channels(const GroupNormProblem& problem) {
  return problem.is_channels_last ? problem.width() : 1;
}

// Blocks of about `threads` for `channels` of them each, and for all positions.
GroupNormLaunch spread_over(const GroupNormProblem& problem, int64_t channels, int64_t threads) {
  constexpr int64_t kSteps = 4;  // of a thread at least: as many loads are under way
  const int64_t steps = problem.steps(), all = divide_up(channels, slot_channels(problem));
  int64_t slots = 0, lanes = 1, turns = 0;
  if (problem.is_channels_last) {
    turns = divide_up(all, threads);
    slots = divide_up(all, turns);
    lanes = std::clamp<int64_t>(threads / slots, 1, steps);
  } else {
    while (lanes < threads && lanes * kSteps < steps) lanes *= 2;
    slots = std::min(all, threads / lanes);
    turns = divide_up(all, slots);
  }
  GroupNormLaunch launch{};
  GroupNormSpread& spread = launch.spread;
  launch.threads = static_cast<int>(round_up(slots * lanes, kWarp));
  spread.slots = static_cast<unsigned>(slots);
  spread.lanes = static_cast<unsigned>(lanes);
  spread.turns = static_cast<unsigned>(turns);
  spread.channels = static_cast<unsigned>(channels);
  spread.strips = static_cast<unsigned>(divide_up(problem.channels, channels));
  spread.stretches = 1;
  spread.stretch = static_cast<unsigned>(steps);
  // What join() of group_norm.cuh takes, and a block whose numbers are one group's: sums are two
  // floats, moments three.
  const int64_t floats = problem.is_backward ? 2 : 3;
  const int64_t warps = launch.threads / kWarp;
  const int64_t joined = problem.is_channels_last ? slots * (lanes / 2) * problem.width() : 0;
  const int64_t parts = std::max(warps, joined);
  spread.scratch = static_cast<unsigned>(
      round_up(parts * floats * static_cast<int64_t>(sizeof(float)), kVectorBytes));
  launch.blocks = problem.samples * spread.strips;
  launch.shared_bytes = spread.scratch;
  return launch;
}

// A block of about `threads` for `groups` of a sample, which keeps all their pieces.
GroupNormLaunch whole_launch(const GroupNormProblem& problem, int64_t groups, int64_t threads) {
  const int64_t channels = groups * (problem.channels / problem.groups);
  GroupNormLaunch launch = spread_over(problem, channels, threads);
  GroupNormSpread& spread = launch.spread;
  const int64_t each = spread.turns * divide_up(problem.steps(), spread.lanes);
  const int64_t kept = each * launch.threads * problem.width() * problem.number_bytes *
                       (problem.is_backward ? 2 : 1);
  launch.is_whole = true;
  launch.shared_bytes += kept + kPair * (channels + groups);
  spread.kept = static_cast<unsigned>(kept);  // where it fits
  return launch;
}

GroupNormLaunch whole_launch(const GroupNormProblem& problem, int64_t groups,
                             const DeviceLimits& limits) {
  constexpr int64_t kMany = 4096, kSome = 1024;
  const int64_t channels = groups * (problem.channels / problem.groups);
  const int64_t pieces = divide_up(channels * problem.positions, problem.width());
  const int64_t threads = pieces >= kMany ? 512 : pieces >= kSome ? 256 : 128;
  const GroupNormLaunch launch = whole_launch(problem, groups, threads);
  if (!problem.is_backward || 2 * (launch.shared_bytes + kReserved) <= limits.shared_bytes) {
    return launch;
  }
  // A multiprocessor has a single one of these blocks, which needs many threads; a little more has
  // to fit for them.
  const GroupNormLaunch larger = whole_launch(problem, groups, 512);
  return larger.shared_bytes + kReserved <= limits.shared_bytes ? larger : launch;
}

// Blocks that share a sample's positions too, as many as fill the GPU.
GroupNormLaunch parts_launch(const GroupNormProblem& problem, const DeviceLimits& limits) {
  // As their launch bounds allow.
  const int64_t threads = problem.is_backward ? 256 : 512, resident = 2 * limits.processors;
  constexpr int64_t kSteps = 8;  // of a thread at least: sums are written for fewer
  const int64_t width = slot_channels(problem), all = problem.channels / width;
  int64_t channels = 1;
  if (problem.is_channels_last) {
    channels = width * divide_up(all, divide_up(all, threads));
  } else {
    const unsigned lanes = spread_over(problem, 1, threads).spread.lanes;
    channels = std::min(all, threads / lanes);
  }
  GroupNormLaunch launch = spread_over(problem, channels, threads);
  GroupNormSpread& spread = launch.spread;
  const int64_t steps = problem.steps();
  const int64_t stretches = std::clamp<int64_t>(resident / launch.blocks, 1,
                                                divide_up(steps, kSteps * int64_t{spread.lanes}));
  const int64_t stretch = divide_up(steps, stretches);
  spread.stretch = static_cast<unsigned>(stretch);
  spread.stretches = static_cast<unsigned>(divide_up(steps, stretch));
  spread.has_groups = channels % (problem.channels / problem.groups) == 0;
  if (spread.has_groups) launch.shared_bytes += kPair * channels;
  launch.blocks *= spread.stretches;
  return launch;
}

int64_t power_of_two_from(int64_t least) {
  int64_t power = 1;
  while (power < least) power *= 2;
  return power;
}

// Of pieces that a group consists of, whole ones, of two channels at most; 0: of none.
unsigned held_piece_bytes(const GroupNormProblem& problem) {
  const int64_t group_channels = problem.channels / problem.groups;
  for (const unsigned bytes : {16U, 8U, 4U, problem.number_bytes}) {
    const int64_t width = bytes / problem.number_bytes;
    if (bytes > problem.aligned_bytes || width == 0) continue;
    if (problem.is_channels_last
            ? group_channels % width == 0
            : group_channels * problem.positions % width == 0 && width <= problem.positions) {
      return bytes;
    }
  }
  return 0;
}

// Groups whose threads alternate in a warp: so many that they read whole sectors together.
int64_t groups_side_by_side(int64_t row_bytes) {
  constexpr int64_t kMost = 4;
  return std::clamp<int64_t>(kSector / power_of_two_from(row_bytes), 1, kMost);
}

// Spreads groups over parts of warps, for about `each` pieces a thread.
void share_warps(const GroupNormProblem& problem, int64_t processors, int64_t each, int64_t side,
                 GroupNormHeldLaunch& launch) {
  // Fewer lanes would read lines of memory that are far apart.
  constexpr int64_t kFewLanes = 8, kThreads = 128, kMostParameters = 2048;
  GroupNormHold& hold = launch.hold;
  const int64_t pieces = hold.vectors, all = problem.samples * problem.groups;
  const int64_t least = std::min(kFewLanes, power_of_two_from(pieces));
  const int64_t lanes =
      std::min(std::max(power_of_two_from(divide_up(pieces, each)), least), kWarp / side);
  // Small blocks where there are few of them, or many channels' parameters.
  const int64_t group_channels = problem.channels / problem.groups;
  int64_t threads = kThreads;
  const auto is_too_large = [&] {
    const int64_t groups = threads / lanes;
    return groups * group_channels > kMostParameters || divide_up(all, groups) < processors;
  };
  while (threads > kWarp && is_too_large()) threads /= 2;
  hold.lanes = static_cast<unsigned>(lanes);
  hold.side = static_cast<unsigned>(side);
  hold.groups = static_cast<unsigned>(threads / lanes);
  launch.threads = static_cast<int>(threads);
}

// By which a piece's number gives its row, or a number's its channel. Exact as long as divisor and
// quotient have a product of 2^16 at most, which no group that is held exceeds.
unsigned multiplier_of(const GroupNormProblem& problem, int64_t row_vectors) {
  const bool is_last = problem.is_channels_last;
  const int64_t quotients = is_last ? problem.positions : problem.channels / problem.groups;
  if (quotients == 1) return 0;
  return static_cast<unsigned>(
      divide_up(int64_t{1} << 31, is_last ? row_vectors : problem.positions));
}

}  // namespace

std::optional<GroupNormHeldLaunch> held_launch(const GroupNormProblem& problem,
                                               const DeviceLimits& limits) {
  // As many bytes are read from the L2 cache twice without much harm.
  constexpr int64_t kLittleBytes = 8 << 20;
  constexpr int64_t kFew = 2, kResident = 1024, kMostChannels = 4096;
  const int64_t group_channels = problem.channels / problem.groups;
  const int64_t all = problem.samples * problem.groups;
  const int64_t numbers = group_channels * problem.positions;
  const unsigned bytes = held_piece_bytes(problem);
  if (bytes == 0 || group_channels > kMostChannels) return {};
  // The backward has two tensors' pieces, and none of channels that are last.
  const bool is_last = problem.is_channels_last, is_backward = problem.is_backward;
  if (is_backward && (is_last || !problem.may_be_whole)) return {};
  const int64_t many = is_backward ? 4 : 8;
  const int64_t width = bytes / problem.number_bytes, pieces = numbers / width;
  const int64_t most_threads = bytes == 16 ? 1024 : 640;  // as their launch bounds allow
  if (pieces > many * most_threads) return {};
  const int64_t row = is_last ? group_channels / width : pieces, row_bytes = row * bytes;
  GroupNormHeldLaunch launch{};
  launch.piece_bytes = bytes;
  GroupNormHold& hold = launch.hold;
  hold.vectors = static_cast<unsigned>(pieces);
  hold.row_vectors = static_cast<unsigned>(row);
  hold.row_step = static_cast<unsigned>(problem.channels / width);
  hold.is_split = !is_last && problem.positions % width != 0;
  hold.multiplier = multiplier_of(problem, row);
  // Few pieces a thread where there are not many in all: the GPU is to be full first.
  const int64_t each =
      std::clamp<int64_t>(divide_up(pieces * all, limits.processors * kResident), 1, many);
  const int64_t side = groups_side_by_side(row_bytes), lanes = kWarp / side;
  const bool is_whole_block =
      row_bytes >= kSector || all * numbers * problem.number_bytes <= kLittleBytes;
  const bool shares_sectors = side > 1 && each > 1;
  if (pieces <= lanes * (shares_sectors || !is_whole_block ? many : std::max(each, kFew))) {
    share_warps(problem, limits.processors, each, side, launch);
  } else if (is_whole_block) {
    const int64_t per_thread = std::max(each, divide_up(pieces, most_threads));
    launch.threads = static_cast<int>(round_up(divide_up(pieces, per_thread), kWarp));
    hold.lanes = static_cast<unsigned>(launch.threads);
    hold.side = hold.groups = 1;
  } else {
    return {};
  }
  launch.has_many = pieces > kFew * hold.lanes;
  launch.blocks = divide_up(all, hold.groups);
  launch.shared_bytes = kPair * hold.groups * group_channels;
  if (is_backward) {
    launch.shared_bytes += hold.groups * (2 * kPair * pieces + kPair * (group_channels + 1));
  }
  if (launch.shared_bytes + kReserved > limits.shared_bytes) return {};
  // A multiprocessor has one such block, where it may have two with the numbers in shared memory
  // (whole_launch): these are faster where all of them then run at once.
  constexpr int kHalf = 512;
  const int64_t kept = 2 * numbers * problem.number_bytes + kReserved;
  const bool has_second_wave =
      launch.blocks > limits.processors && launch.blocks <= 2 * limits.processors;
  if (is_backward && launch.threads > kHalf && has_second_wave && 2 * kept <= limits.shared_bytes) {
    return {};
  }
  return launch;
}

unsigned GroupNormProblem::piece_bytes() const {
  const int64_t innermost = (is_channels_last ? channels : positions) * number_bytes;
  for (const unsigned bytes : {16U, 8U}) {
    if (aligned_bytes % bytes == 0 && innermost % bytes == 0) return bytes;
  }
  return number_bytes;
}

int64_t GroupNormProblem::steps() const {
  return is_channels_last ? positions : positions / width();
}

int64_t GroupNormProblem::piece_groups() const {
  const int64_t group_channels = channels / groups;
  if (!is_channels_last || group_channels % width() == 0) return 1;
  return width() % group_channels == 0 ? width() / group_channels
                                       : divide_up(width() - 1, group_channels) + 1;
}

int64_t GroupNormProblem::width() const {
  return piece_bytes() / number_bytes;
}

GroupNormLaunch group_norm_launch(const GroupNormProblem& problem, const DeviceLimits& limits) {
  // Where channels are last a block reads a segment of every position's: less than two sectors of
  // memory would be read for others too. And a block should have enough to read, as long as there
  // are blocks for the whole GPU.
  constexpr int64_t kSegment = 64, kEnough = 8 << 10;
  const int64_t channel_bytes = int64_t{problem.number_bytes};
  const int64_t group_channels = problem.channels / problem.groups;
  GroupNormLaunch best{};
  int64_t segment = 0;
  for (int64_t groups = 1; problem.may_be_whole && groups <= problem.groups; ++groups) {
    const int64_t channels = groups * group_channels;
    if (problem.groups % groups != 0 || channels % slot_channels(problem) != 0) continue;
    const GroupNormLaunch launch = whole_launch(problem, groups, limits);
    if (launch.shared_bytes > limits.shared_bytes - kReserved) break;
    best = launch;
    segment =
        problem.is_channels_last && groups < problem.groups ? channels * channel_bytes : kSegment;
    const bool is_enough = channels * problem.positions * channel_bytes >= kEnough ||
                           launch.blocks <= 4 * limits.processors;
    if (segment >= kSegment && is_enough) break;
  }
  return segment >= kSector ? best : parts_launch(problem, limits);
}

}  // namespace cudnn_ops
