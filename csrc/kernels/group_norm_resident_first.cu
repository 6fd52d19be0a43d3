// The gradients of group norm by blocks that keep parts of groups, or a whole one, where channels
// are first in memory (group_norm_resident_backward.cuh). Compiled as group_norm_backward.cu is.

#include "group_norm_resident_backward.cuh"

namespace {

// The pieces of a block: a stretch of the positions of each channel of a
// group. Threads of the same slot, whole warps, have the same channel, another one from time to
// time.
template <int kBytes>
struct Rows : Keeping<kBytes, 2> {
  static constexpr int kWidth = kBytes / sizeof(Bits);

  unsigned each;   // turns of a channel
  unsigned turns;  // of the block
  unsigned slot, lane;
  unsigned row;         // pieces of a channel
  unsigned mine;        // pieces of the part's in a channel, from the thread's first on
  unsigned multiplier;  // by which a turn gives how many channels were before: see GroupNormHold
  long long start;      // where the thread's first piece is

  __device__ Rows(const GroupNormCall& call) : Keeping<kBytes, 2>(call) {
    const GroupNormSpread& spread = call.spread;
    slot = threadIdx.x / spread.lanes;
    lane = threadIdx.x - slot * spread.lanes;
    row = call.positions / kWidth;
    const unsigned first = this->part * spread.stretch;
    const unsigned length = min(row, first + spread.stretch) - first;
    each = (length + spread.lanes - 1) / spread.lanes;
    turns = each * spread.turns;
    multiplier = ((1u << 31) + each - 1) / each;
    mine = lane < length ? length - lane : 0;
    start = ((long long)this->unit * this->group_channels() + slot) * row + first + lane;
  }
  // Of a turn: the number of channels that the slot had before.
  __device__ unsigned round(unsigned i) const {
    return (unsigned)((unsigned long long)i * multiplier >> 31);
  }
  __device__ unsigned channel(unsigned round) const {  // in the group
    return round * this->call.spread.slots + slot;
  }
  __device__ bool has(unsigned i) const {
    const unsigned before = round(i);
    return channel(before) < this->group_channels() &&
           (i - before * each) * this->call.spread.lanes < mine;
  }
  __device__ long long offset(unsigned i) const {
    const GroupNormSpread& spread = this->call.spread;
    const unsigned before = round(i);
    return start + (long long)(before * spread.slots) * row + (i - before * each) * spread.lanes;
  }
};

// What a channel's numbers are multiplied by and what is added, with the group's mean in between;
// both times what SiLU's argument comes multiplied by, where there is one.
template <int kBytes>
struct RowChannels {
  static constexpr int kWidth = Rows<kBytes>::kWidth;
  const float2* parameters;
  float center;
  float2 own;  // the factor, and what is added

  __device__ RowChannels(const GroupNormCall& call, const Rows<kBytes>& rows, const Room& room)
      : parameters(room.parameters), center(call.mean[rows.unit]), own{} {
    const float scale = scale_of(call), rstd = call.rstd[rows.unit] * scale;
    const unsigned count = rows.group_channels(), first = rows.unit % call.groups * count;
    for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
      room.parameters[i] = {rstd * weight_of(call, first + i), scale * bias_of(call, first + i)};
    }
  }
  template <bool kHasSilu>
  __device__ void through(float (&x)[kWidth], float (&grad)[kWidth]) const {
    float arguments[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      x[k] -= center;
      arguments[k] = fmaf(x[k], own.x, own.y);
    }
    if constexpr (kHasSilu) Silus::apply_slopes(arguments, grad);
  }
};

// The sums of a warp's channel in its pieces, to `found` when the channel ends: a row a round.
template <bool kStreams, bool kHasSilu, int kBytes>
__device__ void find_sums(const GroupNormCall& call, const Rows<kBytes>& rows,
                          RowChannels<kBytes>& channels, float2* found) {
  using Vector = typename Rows<kBytes>::Vector;
  constexpr int kWidth = Rows<kBytes>::kWidth;
  float2 sums = {};
  const auto use = [&](unsigned i, const Vector* own) {
    const unsigned round = rows.round(i);
    if (rows.has(i)) {
      float x[kWidth], grad[kWidth];
      own[0].read(x);
      own[blockDim.x].read(grad);
      channels.own = channels.parameters[rows.channel(round)];
      channels.template through<kHasSilu>(x, grad);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        sums.x += grad[k];
        sums.y = fmaf(grad[k], x[k], sums.y);
      }
    }
    if (i + 1 < (round + 1) * rows.each) return;
    sums = {sum_within_warp(sums.x, kWarp), sum_within_warp(sums.y, kWarp)};
    if (threadIdx.x % kWarp == 0) found[(round * blockDim.x + threadIdx.x) / kWarp] = sums;
    sums = {};
  };
  read_all<kStreams>(rows, {call.input, call.grad_out}, [](const Vector*) {}, use);
}

template <int kBytes>
__device__ void write_sums(const GroupNormCall& call, const Rows<kBytes>& rows, const Room& room) {
  const GroupNormSpread& spread = call.spread;
  const unsigned count = rows.group_channels(), sample = rows.unit / call.groups;
  const unsigned first = (rows.unit - sample * call.groups) * count;
  const unsigned warps = spread.lanes / kWarp;  // of a channel
  const float scale = scale_of(call), rstd = call.rstd[rows.unit];
  const long long numbers = (long long)call.samples * spread.stretches * call.channels;
  float* partial =
      call.partial + ((long long)sample * spread.stretches + rows.part) * call.channels + first;
  __syncthreads();
  for (unsigned channel = threadIdx.x; channel < count; channel += blockDim.x) {
    const unsigned round = channel / spread.slots, slot = channel - round * spread.slots;
    const auto* found = (const float2*)room.scratch + round * (blockDim.x / kWarp) + slot * warps;
    float2 sum = {};
    for (unsigned warp = 0; warp < warps; ++warp) {
      sum.x += found[warp].x;
      sum.y += found[warp].y;
    }
    sum = {sum.x * scale, sum.y * scale * rstd};
    room.channels[channel] = sum;
    if (call.partial == nullptr) continue;
    partial[channel] = sum.x;
    partial[numbers + channel] = sum.y;
  }
  __syncthreads();
  add_up_groups(call, room.channels, first, 1, [&](unsigned, float sum, float along) {
    ((float2*)call.group_partial)[blockIdx.x] = {sum, along};
  });
}

template <bool kHasSilu, int kBytes>
__device__ void write_gradient(const GroupNormCall& call, const Rows<kBytes>& rows,
                               const Room& room, RowChannels<kBytes>& channels) {
  using Vector = typename Rows<kBytes>::Vector;
  constexpr int kWidth = Rows<kBytes>::kWidth;
  const auto* more = (const Vector*)call.grad_sum;
  const float2 slope = room.slopes[0];
  read_back(rows, {call.input, call.grad_out}, [&](unsigned i, const Vector* own) {
    const long long at = rows.offset(i);
    float x[kWidth], grad[kWidth];
    own[0].read(x);
    own[blockDim.x].read(grad);
    Vector added;
    if (more != nullptr) added = more[at];
    channels.own = channels.parameters[rows.channel(rows.round(i))];
    channels.template through<kHasSilu>(x, grad);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      x[k] = fmaf(channels.own.x, grad[k], -fmaf(x[k], slope.y, slope.x));
    }
    if (more != nullptr) added.add_to(x);
    store_once((Vector*)call.out + at, Vector::of(x));
  });
}

template <bool kHasSilu, int kBytes>
__device__ void resident_backward(const GroupNormCall& call) {
  const Rows<kBytes> rows(call);
  const Room room(call, rows.group_channels(), 1);
  RowChannels<kBytes> channels(call, rows, room);
  __syncthreads();
  auto* found = (float2*)room.scratch;
  if (call.spread.streams) {
    find_sums<true, kHasSilu>(call, rows, channels, found);
  } else {
    find_sums<false, kHasSilu>(call, rows, channels, found);
  }
  write_sums(call, rows, room);
  join_parts(call, rows.unit, 1, room.slopes);
  write_gradient<kHasSilu>(call, rows, room, channels);
  add_up_totals(call);
}

template <int kBytes>
__device__ void resident_backward(const GroupNormCall& call) {
  if (call.has_silu) return resident_backward<true, kBytes>(call);
  resident_backward<false, kBytes>(call);
}

}  // namespace

GROUP_NORM_RESIDENT_BACKWARD(16, first, 512)
GROUP_NORM_RESIDENT_BACKWARD(8, first, 512)
