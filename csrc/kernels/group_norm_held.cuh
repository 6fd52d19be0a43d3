// What group_norm_held.cu and group_norm_held_backward.cu share: which numbers of a group that
// stays in registers a thread has, and their parameters.
#pragma once

#include "group_norm.cuh"

// The pieces of a group: rows of them side by side in memory, a row a position where channels are
// last, else a single row, of which a piece may have the last numbers of one channel and the first
// of the next.
template <int kBytes, bool kIsLast>
struct HeldGroup {
  static constexpr int kWidth = kBytes / sizeof(Bits);
  using Vector = Piece<Type, kWidth>;

  const GroupNormHold& hold;
  unsigned member, lane;  // the group's number in the block, and the thread's in the group
  unsigned group;         // of all samples
  unsigned vectors;       // 0: there is no such group
  long long start;        // where the first of its pieces is

  __device__ HeldGroup(const GroupNormCall& call) : hold(call.hold) {
    const unsigned thread = threadIdx.x;
    // Threads that are side by side have groups that are, so that they read whole sectors.
    const unsigned together = hold.lanes * hold.side, part = thread / together;
    const unsigned within = thread - part * together;
    lane = within / hold.side;
    member = part * hold.side + (within - lane * hold.side);
    group = blockIdx.x * hold.groups + member;
    vectors = group < call.samples * call.groups ? hold.vectors : 0;
    const unsigned sample = group / call.groups;
    start = kIsLast ? (long long)sample * call.positions * hold.row_step +
                          (long long)(group - sample * call.groups) * hold.row_vectors
                    : (long long)group * hold.vectors;
  }

  // number / the divisor of the call: exact for what numbers a group has.
  __device__ unsigned divide(unsigned number) const {
    return (unsigned)((unsigned long long)number * hold.multiplier >> 31);
  }
  __device__ long long offset(unsigned piece) const {
    if constexpr (!kIsLast) return start + piece;
    const unsigned row = divide(piece);
    return start + (long long)row * hold.row_step + (piece - row * hold.row_vectors);
  }

  // Calls `visit` with the index of each of the thread's pieces, and which of the group's it is.
  template <int kVectors, class Visit>
  __device__ void each(const Visit& visit) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const unsigned piece = lane + v * hold.lanes;
      if (piece < vectors) visit(v, piece);
    }
  }

  // Over the threads of the group; every thread of the block must come here.
  __device__ float sum(float value, float (&scratch)[1][32]) const {
    if (hold.lanes > 32) {
      float sums[1] = {value};
      sum_up(sums, hold.lanes, scratch);
      return sums[0];
    }
    for (unsigned distance = hold.lanes * hold.side / 2; distance >= hold.side; distance /= 2) {
      value += __shfl_xor_sync(~0u, value, distance);
    }
    return value;
  }
};

// Calls `write` with the number of each of the block's channels, a group's behind the other's, and
// what `read` gives for it: several of a thread's are on their way at the same time.
template <class Read, class Write>
__device__ void read_each(const GroupNormCall& call, const Read& read, const Write& write) {
  constexpr int kAhead = 4;
  const unsigned group_channels = call.channels / call.groups;
  const unsigned first = blockIdx.x * call.hold.groups % call.groups * group_channels;
  const unsigned count = call.hold.groups * group_channels;
  for (unsigned at = threadIdx.x; at < count; at += kAhead * blockDim.x) {
    float values[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const unsigned channel = at + i * blockDim.x;
      if (channel < count) values[i] = read((first + channel) % call.channels);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const unsigned channel = at + i * blockDim.x;
      if (channel < count) write(channel, values[i]);
    }
  }
}

// By the parameter's type, which is asked once: a load behind a branch would wait for the one
// before it.
template <class Write>
__device__ void read_parameter(const GroupNormCall& call, const void* data, bool is_float,
                               float otherwise, const Write& write) {
  if (data == nullptr) {
    read_each(call, [&](unsigned) { return otherwise; }, write);
  } else if (is_float) {
    read_each(call, [&](unsigned channel) { return ((const float*)data)[channel]; }, write);
  } else {
    read_each(
        call, [&](unsigned channel) { return Type::read(((const Bits*)data)[channel]); }, write);
  }
}

// Weight and bias of the channels of the block's groups.
__device__ void read_parameters(const GroupNormCall& call, float2* parameters) {
  read_parameter(call, call.weight, call.is_weight_float, 1,
                 [&](unsigned channel, float value) { parameters[channel].x = value; });
  read_parameter(call, call.bias, call.is_bias_float, 0,
                 [&](unsigned channel, float value) { parameters[channel].y = value; });
}

// The parameters of a piece's numbers where channels are first, of groups with such a 1 /
// deviation. From `left` on the numbers are the next channel's, if pieces may have two.
template <bool kIsSplit>
struct HeldPiece {
  unsigned left;
  float factors[2], shifts[2];

  template <int kBytes>
  __device__ HeldPiece(const GroupNormCall& call, const HeldGroup<kBytes, false>& group,
                       unsigned piece, const float2* parameters, float rstd) {
    constexpr unsigned kWidth = HeldGroup<kBytes, false>::kWidth;
    const unsigned number = piece * kWidth, channel = group.divide(number);
    left = kIsSplit ? (channel + 1) * call.positions - number : kWidth;
#pragma unroll
    for (int i = 0; i < (kIsSplit ? 2 : 1); ++i) {
      const float2 own = parameters[left < kWidth ? channel + i : channel];
      factors[i] = rstd * own.x;
      shifts[i] = own.y;
    }
  }
  __device__ bool is_next(int k) const {
    return kIsSplit && (unsigned)k >= left;
  }
  __device__ float factor(int k) const {
    return is_next(k) ? factors[1] : factors[0];
  }
  __device__ float shift(int k) const {
    return is_next(k) ? shifts[1] : shifts[0];
  }
};
