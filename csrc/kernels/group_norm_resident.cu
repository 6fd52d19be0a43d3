// Group norm that reads its numbers once, by one launch whose blocks all run at the same time.
// Compiled as group_norm_forward.cu is, whose kernels take three launches where groups are too
// large for a block.
//
// A block reads its part of a unit (group_norm_resident.cuh) into shared memory and finds the
// moments of its groups; when all blocks have (grid_barrier.cuh) it joins those of its unit's
// parts, every block in the same order, and writes the norm. What does not fit is read again behind
// the barrier, the last of it first, which is in the L2 cache still.

#include "group_norm_moments.cuh"
#include "group_norm_resident.cuh"

namespace {

template <int kBytes, bool kIsLast>
using Pieces = Part<kBytes, kIsLast, 1>;

// Shared memory behind the pieces: parts of threads to be joined, weight and bias of the unit's
// channels where they are first, mean and 1 / deviation of its groups.
struct Room {
  Moments* found;
  float2 *parameters, *stats;

  __device__ Room(const GroupNormCall& call, bool is_last) {
    extern __shared__ uint4 memory[];
    auto* scratch = (unsigned char*)memory + call.spread.kept;
    found = (Moments*)scratch;
    parameters = (float2*)(scratch + call.spread.scratch);
    stats = parameters + (is_last ? 0 : call.channels / call.groups);
  }
};

// The moments of a thread's numbers: of its pieces as a whole, or of each of their channels. They
// come from sums of the distances from the first number and of their squares, three instructions a
// number. As that is one of the numbers itself, what the mean's square takes off the squares leaves
// a part of them no smaller than one of a number more than there are, so that few digits are lost,
// whatever the numbers are. Equal numbers have no distance, and are their own mean.
template <int kWidth, bool kIsOfChannels>
struct NearMoments {
  static constexpr int kChannels = kIsOfChannels ? kWidth : 1;
  float count;
  float scale;  // a power of two, 1 / count or less: sums of large numbers stay finite
  float bases[kChannels] = {}, sums[kChannels] = {}, squares[kChannels] = {};

  __device__ NearMoments(unsigned pieces) {
    const unsigned numbers = pieces * (kWidth / kChannels);
    count = (float)numbers;
    scale = __uint_as_float((95 + __clz(numbers - 1)) << 23);
  }
  __device__ void begin(const float (&values)[kWidth]) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) bases[c] = values[c];
  }
  __device__ void take(const float (&values)[kWidth]) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const int c = kIsOfChannels ? k : 0;
      const float distance = values[k] - bases[c];
      sums[c] = fmaf(distance, scale, sums[c]);
      squares[c] = fmaf(distance, distance, squares[c]);
    }
  }
  __device__ void finish(Moments (&all)[kChannels]) const {
    constexpr float kMost = 3.4028235e38f;
    const float share = 1 / (count * scale);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      const float distance = sums[c] * share;
      const float left = fmaf(-count * distance, distance, squares[c]);
      // What is infinite, or no number, stays so.
      const float squared = squares[c] <= kMost ? fmaxf(left, 0) : squares[c];
      all[c] = count == 0 ? Moments{} : Moments{bases[c] + distance, squared, count};
    }
  }
};

// Reads all pieces, or writes and keeps their sum with the residual's.
template <bool kAdds, bool kStreams, int kBytes, bool kIsLast, class Found>
__device__ void read_pieces(const GroupNormCall& call, const Pieces<kBytes, kIsLast>& part,
                            Found& found) {
  using Vector = typename Pieces<kBytes, kIsLast>::Vector;
  constexpr int kWidth = Pieces<kBytes, kIsLast>::kWidth;
  const auto* residual = (const Vector*)call.residual;
  Vector added[2];
  if constexpr (kAdds) {
#pragma unroll
    for (unsigned i = 0; i < 2; ++i) {
      if (part.has(i)) added[i] = residual[part.offset(i)];
    }
  }
  const auto begin = [&](const Vector* own) {
    if (!part.has(0)) return;
    float values[kWidth];
    own->read(values);
    if constexpr (kAdds) {
      added[0].add_to(values);
      Vector::of(values).read(values);
    }
    found.begin(values);
  };
  const auto use = [&](unsigned i, Vector* own) {
    if (!part.has(i)) return;
    float values[kWidth];
    own->read(values);
    if constexpr (kAdds) {
      added[0].add_to(values);
      added[0] = added[1];
      if (part.has(i + 2)) added[1] = residual[part.offset(i + 2)];
      // The norm is of what is written.
      const Vector sum = Vector::of(values);
      ((Vector*)call.sum)[part.offset(i)] = sum;
      *own = sum;
      sum.read(values);
    }
    found.take(values);
  };
  read_all<kStreams>(part, {call.input}, begin, use);
}

// The moments of the thread's channels by their groups, of which each takes a row of `all`. Every
// channel has as many numbers.
template <int kWidth>
__device__ void share_by_groups(const GroupNormCall& call, const Moments (&found)[kWidth],
                                unsigned channel, Moments* all) {
  const unsigned group_channels = call.channels / call.groups;
  unsigned left = group_channels - channel % group_channels;
  const float count = found[0].floats[2];
  float channels = 0, mean = 0, squares = 0;
  all += threadIdx.x;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    const float share = near_reciprocal(channels + 1), distance = found[k].floats[0] - mean;
    squares += fmaf(distance * channels * count, distance * share, found[k].floats[1]);
    mean = fmaf(distance, share, mean);
    channels += 1;
    if (--left > 0 && k < kWidth - 1) continue;
    *all = {mean, squares, channels * count};
    all += blockDim.x;
    left = group_channels;
    channels = mean = squares = 0;
  }
}

// Joins the moments of so many parts, which `get` gives by their indices, by the threads of a warp
// in a fixed order: the first one's are of some numbers. Each part is asked for once, as long as
// there are few, and all of them at the same time.
template <class Get>
__device__ Moments join_in_warp(unsigned parts, const Get& get) {
  constexpr unsigned kHeld = 2;
  const unsigned lane = threadIdx.x % kWarp;
  Moments held[kHeld] = {};
#pragma unroll
  for (unsigned h = 0; h < kHeld; ++h) {
    const unsigned i = h * kWarp + lane;
    if (h * kWarp >= parts) break;
    held[h] = get(min(i, parts - 1));
    if (i >= parts) held[h] = {};
  }
  const float base = __shfl_sync(~0u, held[0].floats[0], 0);
  float count = 0, apart = 0;
  const auto add = [&](const Moments& part) {
    count += part.floats[2];
    apart = fmaf(part.floats[2], part.floats[0] - base, apart);
  };
#pragma unroll
  for (const Moments& part : held) add(part);
  for (unsigned i = kHeld * kWarp + lane; i < parts; i += kWarp) add(get(i));
  count = sum_within_warp(count, kWarp);
  const float mean = base + sum_within_warp(apart, kWarp) / count;
  float squares = 0;
  const auto add_squares = [&](const Moments& part) {
    const float distance = part.floats[0] - mean;
    squares += fmaf(part.floats[2] * distance, distance, part.floats[1]);
  };
#pragma unroll
  for (const Moments& part : held) add_squares(part);
  for (unsigned i = kHeld * kWarp + lane; i < parts; i += kWarp) add_squares(get(i));
  return {mean, sum_within_warp(squares, kWarp), count};
}

// Means of all parts of all groups of all units, then what belongs to them.
template <int kBytes, bool kIsLast>
__device__ float* part_of(const GroupNormCall& call, const Pieces<kBytes, kIsLast>& part,
                          unsigned group, unsigned index) {
  return call.partial + ((part.unit * part.groups() + group) * call.spread.stretches + index);
}

template <int kBytes, bool kIsLast>
__device__ void write_part(const GroupNormCall& call, const Pieces<kBytes, kIsLast>& part,
                           unsigned group, const Moments& moments) {
  float* to = part_of(call, part, group, part.part);
  to[0] = moments.floats[0];
  to[call.samples * call.groups * call.spread.stretches] = moments.floats[1];
}

// The moments of each of the unit's groups in this part, which other blocks read.
template <int kBytes, bool kIsLast, int kChannels>
__device__ void write_moments(const GroupNormCall& call, const Pieces<kBytes, kIsLast>& part,
                              const Room& room, const Moments (&found)[kChannels]) {
  const unsigned warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  if constexpr (kIsLast) {
    constexpr unsigned kWidth = Pieces<kBytes, true>::kWidth;
    share_by_groups(call, found, part.channel(), room.found);
    __syncthreads();
    const unsigned group_channels = part.group_channels(), slots = call.spread.slots;
    for (unsigned group = warp; group < call.groups; group += warps) {
      const unsigned first = group * group_channels, first_slot = first / kWidth;
      const unsigned of_group = (first + group_channels - 1) / kWidth - first_slot + 1;
      const Moments all = join_in_warp(of_group * call.spread.lanes, [&](unsigned i) {
        const unsigned lane = i / of_group, slot = first_slot + (i - lane * of_group);
        const unsigned row = group - slot * kWidth / group_channels;
        return room.found[row * blockDim.x + lane * slots + slot];
      });
      if (threadIdx.x % kWarp == 0) write_part(call, part, group, all);
    }
  } else {
    Moments all = found[0];
    join_lanes(all, kWarp);
    if (threadIdx.x % kWarp == 0) room.found[warp] = all;
    __syncthreads();
    if (warp > 0) return;
    all = join_in_warp(warps, [&](unsigned i) { return room.found[i]; });
    if (threadIdx.x == 0) write_part(call, part, 0, all);
  }
}

// Mean and 1 / deviation of the unit's groups, from all its parts.
template <int kBytes, bool kIsLast>
__device__ void find_stats(const GroupNormCall& call, const Pieces<kBytes, kIsLast>& part,
                           float2* stats) {
  const unsigned stretch = call.spread.stretch, steps = part.all_steps();
  const unsigned numbers = kIsLast ? part.group_channels() : Pieces<kBytes, kIsLast>::kWidth;
  for (unsigned group = threadIdx.x / kWarp; group < part.groups(); group += blockDim.x / kWarp) {
    const Moments all = join_in_warp(call.spread.stretches, [&](unsigned i) -> Moments {
      const float* from = part_of(call, part, group, i);
      const float count = (float)numbers * min(stretch, steps - i * stretch);
      return {from[0], from[call.samples * call.groups * call.spread.stretches], count};
    });
    if (threadIdx.x % kWarp > 0) continue;
    const float mean = all.floats[0], rstd = rsqrtf(all.floats[1] / all.floats[2] + call.eps);
    stats[group] = {mean, rstd};
    if (call.mean == nullptr || part.part > 0) continue;
    const unsigned at = part.unit * part.groups() + group;
    call.mean[at] = mean;
    call.rstd[at] = rstd;
  }
}

// What the channels of a piece are multiplied by and what is added, with the mean in between; both
// times what SiLU's argument comes multiplied by, where there is one.
template <int kBytes, bool kIsLast>
struct Parameters {
  static constexpr int kChannels = kBytes / sizeof(Bits);
  float centers[kChannels], factors[kChannels], shifts[kChannels];

  // Before the statistics are known, so that nothing waits for it behind them.
  __device__ void load(const GroupNormCall& call, const Pieces<kBytes, true>& part, const Room&) {
    read_parameters(call.weight, call.is_weight_float, part.channel(), 1, factors);
    read_parameters(call.bias, call.is_bias_float, part.channel(), 0, shifts);
  }
  __device__ void finish(const GroupNormCall& call, const Pieces<kBytes, true>& part,
                         const Room& room) {
    const float scale = call.has_silu ? Silus::kScale : 1;
    const unsigned group_channels = part.group_channels();
    unsigned group = part.channel() / group_channels;
    unsigned left = (group + 1) * group_channels - part.channel();
#pragma unroll
    for (int k = 0; k < kChannels; ++k) {
      const float2 stats = room.stats[group];
      centers[k] = stats.x;
      factors[k] *= stats.y * scale;
      shifts[k] *= scale;
      if (--left > 0) continue;
      left = group_channels;
      group = min(group + 1, call.groups - 1);
    }
  }
  __device__ void go_back(const Room&) {
  }
};

// Channels first these are another channel's from time to time, as pieces come from the last to the
// first.
template <int kBytes>
struct Parameters<kBytes, false> {
  float centers[1], factors[1], shifts[1];
  float rstd, scale;
  unsigned channel, rest;             // of the group; pieces of it before this one
  unsigned row, back, channels_back;  // pieces of a channel, and to the thread's next

  __device__ void load(const GroupNormCall& call, const Pieces<kBytes, false>& part,
                       const Room& room) {
    const unsigned count = part.group_channels(), first = part.unit % call.groups * count;
    for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
      room.parameters[i] = {weight_of(call, first + i), bias_of(call, first + i)};
    }
    row = call.positions / Pieces<kBytes, false>::kWidth;
    channels_back = part.active / row;
    back = part.active - channels_back * row;
    // One beyond the thread's last, which go_back() then comes to.
    const unsigned beyond = part.first_piece + part.count * part.active;
    channel = beyond / row;
    rest = beyond - channel * row;
  }
  __device__ void finish(const GroupNormCall& call, const Pieces<kBytes, false>&,
                         const Room& room) {
    scale = call.has_silu ? Silus::kScale : 1;
    centers[0] = room.stats[0].x;
    rstd = room.stats[0].y * scale;
  }
  __device__ void go_back(const Room& room) {
    channel -= channels_back;
    if (rest < back) {
      rest += row;
      --channel;
    }
    rest -= back;
    const float2 own = room.parameters[channel];
    factors[0] = own.x * rstd;
    shifts[0] = own.y * scale;
  }
};

template <bool kHasSilu, int kBytes, bool kIsLast>
__device__ void normalize(const GroupNormCall& call, const Pieces<kBytes, kIsLast>& part,
                          const Room& room, Parameters<kBytes, kIsLast>& parameters) {
  using Vector = typename Pieces<kBytes, kIsLast>::Vector;
  constexpr int kWidth = Pieces<kBytes, kIsLast>::kWidth;
  const bool streams = call.spread.streams;
  read_back(part, {call.residual == nullptr ? call.input : call.sum}, [&](unsigned i, Vector* own) {
    float values[kWidth];
    own->read(values);
    parameters.go_back(room);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const int c = kIsLast ? k : 0;
      values[k] =
          fmaf(values[k] - parameters.centers[c], parameters.factors[c], parameters.shifts[c]);
    }
    if constexpr (kHasSilu) Silus::apply(values);
    Vector* to = (Vector*)call.out + part.offset(i);
    if (streams) {
      store_once(to, Vector::of(values));
    } else {
      *to = Vector::of(values);
    }
  });
}

template <int kBytes, bool kIsLast>
__device__ void resident(const GroupNormCall& call) {
  using Pieces = Pieces<kBytes, kIsLast>;
  const Pieces part(call);
  const Room room(call, kIsLast);
  Moments moments[Pieces::kChannels];
  {
    NearMoments<Pieces::kWidth, kIsLast> found(part.count);
    if (call.residual != nullptr) {
      read_pieces<true, true>(call, part, found);
    } else if (call.spread.streams) {
      read_pieces<false, true>(call, part, found);
    } else {
      read_pieces<false, false>(call, part, found);
    }
    found.finish(moments);
  }
  write_moments(call, part, room, moments);
  const unsigned before = arrive_at_grid();
  Parameters<kBytes, kIsLast> parameters;
  parameters.load(call, part, room);
  wait_for_grid(before);
  find_stats(call, part, room.stats);
  __syncthreads();
  parameters.finish(call, part, room);
  if (call.has_silu) {
    normalize<true>(call, part, room, parameters);
  } else {
    normalize<false>(call, part, room, parameters);
  }
}

}  // namespace

GROUP_NORM(resident, 16, 1024, 1)
GROUP_NORM(resident, 8, 1024, 1)
