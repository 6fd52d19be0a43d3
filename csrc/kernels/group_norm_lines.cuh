// The norm of what blocks keep (group_norm_products.cuh), which lies on a line for each channel.
#pragma once

#include "group_norm_products.cuh"
#include "silu_pairs.cuh"

using Silus = SiluPairs<Type::kDigits>;

// What a piece's numbers are multiplied by and what is added, before which the mean is taken off
// where it is far from zero; both times what SiLU's argument comes multiplied by.
template <bool kIsLast>
struct LinesOf {
  static constexpr int kChannels = kIsLast ? kNumbers : 1;
  float centers[kChannels], factors[kChannels], shifts[kChannels];

  // Before the statistics are known, so that nothing waits for it behind them.
  __device__ void load(const PartOf<true>& part, const RoomOf&) {
    const GroupNormCall& call = part.call;
    const unsigned channel = (part.strip * call.spread.slots + part.slot) * kNumbers;
    read_parameters(call.weight, call.is_weight_float, channel, 1, factors);
    read_parameters(call.bias, call.is_bias_float, channel, 0, shifts);
  }
  template <bool kIsFar>
  __device__ void finish(const PartOf<true>& part, const RoomOf& room, float scale) {
    const unsigned channel = part.slot * kNumbers;
    unsigned group = divide_few(channel, part.group_channels);
    unsigned left = (group + 1) * part.group_channels - channel;
#pragma unroll
    for (int k = 0; k < kChannels; ++k) {
      const float2 stats = room.stats[group];
      centers[k] = stats.x;
      factors[k] *= stats.y * scale;
      shifts[k] *= scale;
      if constexpr (!kIsFar) shifts[k] = fmaf(-stats.x, factors[k], shifts[k]);
      if (--left > 0) continue;
      left = part.group_channels;
      group = min(group + 1, part.groups() - 1);
    }
  }
  template <bool kIsFar>
  __device__ void next(const RoomOf&) {
  }
};

// Channels first these are another channel's from time to time.
template <>
struct LinesOf<false> {
  float centers[1], factors[1], shifts[1];
  float rstd, scale;
  unsigned channel, rest;               // of the group; pieces of it before this one
  unsigned row, ahead, channels_ahead;  // pieces of a channel, and to the thread's next

  __device__ void load(const PartOf<false>& part, const RoomOf& room) {
    const GroupNormCall& call = part.call;
    const unsigned count = part.group_channels, first = part.strip * count;
    for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
      room.parameters[i] = {weight_of(call, first + i), bias_of(call, first + i)};
    }
    row = call.positions / kNumbers;
    channels_ahead = part.active / row;
    ahead = part.active - channels_ahead * row;
    const unsigned begin = part.first + threadIdx.x;
    channel = begin / row;
    rest = begin - channel * row;
  }
  template <bool kIsFar>
  __device__ void finish(const PartOf<false>&, const RoomOf& room, float scale) {
    this->scale = scale;
    centers[0] = room.stats[0].x;
    rstd = room.stats[0].y * scale;
  }
  template <bool kIsFar>
  __device__ void next(const RoomOf& room) {
    const float2 own = room.parameters[channel];
    factors[0] = own.x * rstd;
    shifts[0] = own.y * scale;
    if constexpr (!kIsFar) shifts[0] = fmaf(-centers[0], factors[0], shifts[0]);
    channel += channels_ahead;
    rest += ahead;
    if (rest < row) return;
    rest -= row;
    ++channel;
  }
};

template <bool kHasSilu, bool kIsFar, bool kIsLast>
__device__ void normalize(const PartOf<kIsLast>& part, const RoomOf& room,
                          LinesOf<kIsLast>& lines) {
  lines.template finish<kIsFar>(part, room, kHasSilu ? Silus::kScale : 1);
  const auto* from = (const Vector*)room.kept + threadIdx.x;
  auto* to = (Vector*)part.call.out + part.start + part.lane * part.pitch + part.slot;
  const unsigned step = part.call.spread.lanes * part.pitch;
#pragma unroll 2
  for (unsigned i = 0; i < part.count; ++i) {
    float values[kNumbers];
    from->read(values);
    lines.template next<kIsFar>(room);
#pragma unroll
    for (int k = 0; k < kNumbers; ++k) {
      const int c = kIsLast ? k : 0;
      const float value = kIsFar ? values[k] - lines.centers[c] : values[k];
      values[k] = fmaf(value, lines.factors[c], lines.shifts[c]);
    }
    if constexpr (kHasSilu) Silus::apply(values);
    *to = Vector::of(values);
    from += part.active;
    to += step;
  }
}

template <bool kIsLast>
__device__ void normalize(const PartOf<kIsLast>& part, const RoomOf& room, bool is_far,
                          LinesOf<kIsLast>& lines) {
  if (part.call.has_silu) {
    if (is_far) {
      normalize<true, true>(part, room, lines);
    } else {
      normalize<true, false>(part, room, lines);
    }
  } else if (is_far) {
    normalize<false, true>(part, room, lines);
  } else {
    normalize<false, false>(part, room, lines);
  }
}
