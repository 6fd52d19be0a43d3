#include "kernels/group_norm_launch.h"

#include <algorithm>

namespace cudnn_ops {
namespace {

constexpr int64_t kWarp = 32, kVectorBytes = 16;
constexpr auto kPair = 2 * static_cast<int64_t>(sizeof(float));

// Positions as threads count them, and the channels of a slot.
int64_t steps_of(const GroupNormProblem& problem) {
  return problem.is_channels_last ? problem.positions : problem.positions / problem.width();
}

int64_t slot_channels(const GroupNormProblem& problem) {
  return problem.is_channels_last ? problem.width() : 1;
}

int64_t round_up(int64_t number, int64_t to) {
  return divide_up(number, to) * to;
}

// Blocks of about `threads` for `channels` of them each, and for all positions.
GroupNormLaunch spread_over(const GroupNormProblem& problem, int64_t channels, int64_t threads) {
  constexpr int64_t kSteps = 4;  // of a thread at least: as many loads are under way
  const int64_t steps = steps_of(problem), all = divide_up(channels, slot_channels(problem));
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

// A block for `groups` of a sample, which keeps all their pieces.
GroupNormLaunch whole_launch(const GroupNormProblem& problem, int64_t groups) {
  constexpr int64_t kMany = 4096, kSome = 1024;
  const int64_t channels = groups * (problem.channels / problem.groups);
  const int64_t pieces = divide_up(channels * problem.positions, problem.width());
  GroupNormLaunch launch = spread_over(problem, channels,
                                       pieces >= kMany   ? 512
                                       : pieces >= kSome ? 256
                                                         : 128);
  GroupNormSpread& spread = launch.spread;
  const int64_t each = spread.turns * divide_up(steps_of(problem), spread.lanes);
  const int64_t kept = each * launch.threads * problem.width() * problem.number_bytes *
                       (problem.is_backward ? 2 : 1);
  launch.is_whole = true;
  launch.shared_bytes += kept + kPair * (channels + groups);
  spread.kept = static_cast<unsigned>(kept);  // where it fits
  return launch;
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
  const int64_t steps = steps_of(problem);
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

}  // namespace

unsigned GroupNormProblem::piece_bytes() const {
  const int64_t innermost = (is_channels_last ? channels : positions) * number_bytes;
  for (const unsigned bytes : {16U, 8U}) {
    if (aligned_bytes % bytes == 0 && innermost % bytes == 0) return bytes;
  }
  return number_bytes;
}

int64_t GroupNormProblem::width() const {
  return piece_bytes() / number_bytes;
}

GroupNormLaunch group_norm_launch(const GroupNormProblem& problem, const DeviceLimits& limits) {
  // Where channels are last a block reads a segment of every position's: less than two sectors of
  // memory would be read for others too. And a block should have enough to read, as long as there
  // are blocks for the whole GPU.
  constexpr int64_t kReserved = 1 << 10, kSegment = 64, kSector = 32, kEnough = 8 << 10;
  const int64_t channel_bytes = int64_t{problem.number_bytes};
  const int64_t group_channels = problem.channels / problem.groups;
  GroupNormLaunch best{};
  int64_t segment = 0;
  for (int64_t groups = 1; problem.may_be_whole && groups <= problem.groups; ++groups) {
    const int64_t channels = groups * group_channels;
    if (problem.groups % groups != 0 || channels % slot_channels(problem) != 0) continue;
    const GroupNormLaunch launch = whole_launch(problem, groups);
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
