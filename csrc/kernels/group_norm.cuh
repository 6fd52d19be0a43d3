// What the kernels of group norm share: which numbers a thread has, and how
// the threads of a channel join what they found. One code serves both memory orders: where channels
// are last (kIsLast) a piece has one position of several channels, else several positions of one
// channel.
#pragma once

#include "activation.cuh"
#include "async_copy.cuh"
#include "group_norm_call.h"
#include "number.cuh"
#include "threads.cuh"

using Type = KERNEL_TYPE;
using Bits = Type::Bits;

// The numbers of a block: a stretch of the positions of a strip of a sample's channels.
template <int kBytes, bool kIsLast>
struct Tile {
  static constexpr int kWidth = kBytes / sizeof(Bits);
  static constexpr int kChannels = kIsLast ? kWidth : 1;  // of a piece
  using Vector = Piece<Type, kWidth>;

  const GroupNormCall& call;
  unsigned slot, lane, sample, row;  // row: of the partial sums
  unsigned first_channel, end_channel;
  unsigned first, end;  // of the thread's positions
  unsigned numbers;     // of the block in each channel

  __device__ Tile(const GroupNormCall& call, unsigned block) : call(call) {
    const GroupNormSpread& spread = call.spread;
    const unsigned thread = threadIdx.x;
    slot = kIsLast ? thread % spread.slots : thread / spread.lanes;
    lane = kIsLast ? thread / spread.slots : thread % spread.lanes;
    const unsigned strip = block % spread.strips;
    row = block / spread.strips;
    sample = row / spread.stretches;
    first_channel = strip * spread.channels;
    end_channel = min(call.channels, first_channel + spread.channels);
    const unsigned begin = (row - sample * spread.stretches) * spread.stretch;
    first = begin + lane;
    end = min(kIsLast ? call.positions : call.positions / kWidth, begin + spread.stretch);
    numbers = (end - begin) * (kIsLast ? 1 : kWidth);
  }

  // The first of the thread's channels in a turn.
  __device__ unsigned channel(unsigned turn) const {
    return first_channel + (turn * call.spread.slots + slot) * kChannels;
  }
  __device__ bool has(unsigned channel) const {
    return lane < call.spread.lanes && slot < call.spread.slots && channel < end_channel;
  }
  // Where the pieces of a channel begin.
  __device__ long long offset(unsigned channel) const {
    const long long start = (long long)sample * call.channels * call.positions;
    return (start + (kIsLast ? channel : (long long)channel * call.positions)) / kWidth;
  }

  // Calls `visit` with the index of each of a piece's channels from that one on, the channel and
  // its group.
  template <class Visit>
  __device__ void each_channel(unsigned channel, const Visit& visit) const {
    const unsigned group_channels = call.channels / call.groups;
    unsigned group = channel / group_channels, left = (group + 1) * group_channels - channel;
#pragma unroll
    for (int k = 0; k < kChannels; ++k) {
      visit(k, channel + k, group);
      if (--left > 0) continue;
      left = group_channels;
      ++group;
    }
  }

  // For each position of the thread `load` with an index below kAhead and where its piece is, then
  // `use` likewise: several loads are under way before the first is waited for.
  template <int kAhead, class Load, class Use>
  __device__ void each(unsigned channel, const Load& load, const Use& use) const {
    const long long start = offset(channel);
    const unsigned step = kIsLast ? call.channels / kWidth : 1;
    const unsigned lanes = call.spread.lanes;
    for (unsigned at = first; at < end; at += kAhead * lanes) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const unsigned position = at + i * lanes;
        if (position < end) load(i, start + (long long)position * step);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const unsigned position = at + i * lanes;
        if (position < end) use(i, start + (long long)position * step);
      }
    }
  }
};

// A block's shared memory: the pieces that threads keep, each its own; room to join; and two
// numbers of each channel and of each group.
struct Shared {
  unsigned char* kept;
  float *scratch, *channels, *groups;

  __device__ Shared(const GroupNormSpread& spread) {
    extern __shared__ uint4 memory[];
    kept = (unsigned char*)memory;
    scratch = (float*)(kept + spread.kept);
    channels = (float*)(kept + spread.kept + spread.scratch);
    groups = channels + 2 * spread.channels;
  }
};

// Sends for a piece without waiting for it, where an instruction does: see wait_for_copies().
template <class Vector>
__device__ void send_for(Vector* kept, const Vector* from) {
  if constexpr (sizeof(Vector) >= 4) {
    copy_async<sizeof(Vector)>(kept, from);
  } else {
    *kept = *from;
  }
}

// Puts all of the thread's pieces of a tensor, or two, where it keeps them, with all loads under
// way at once; their order is that in which Tile::each() comes to them.
template <int kBytes, bool kIsLast>
__device__ void keep(const GroupNormCall& call, const Tile<kBytes, kIsLast>& tile,
                     const Shared& shared, const void* one, const void* other = nullptr) {
  using Vector = typename Tile<kBytes, kIsLast>::Vector;
  auto* kept = (Vector*)shared.kept + threadIdx.x;
  for (unsigned turn = 0; turn < call.spread.turns; ++turn) {
    const unsigned channel = tile.channel(turn);
    if (!tile.has(channel)) continue;
    const auto send = [&](int, long long at) {
      send_for(kept, (const Vector*)one + at);
      kept += blockDim.x;
      if (other == nullptr) return;
      send_for(kept, (const Vector*)other + at);
      kept += blockDim.x;
    };
    tile.template each<4>(channel, send, [](int, long long) {});
  }
  wait_for_copies();
}

__device__ float read_parameter(const void* data, bool is_float, unsigned channel,
                                float otherwise) {
  if (data == nullptr) return otherwise;
  return is_float ? ((const float*)data)[channel] : Type::read(((const Bits*)data)[channel]);
}

// Of channels side by side. The type is asked for once: a load behind a branch would wait for the
// one before it.
template <int kChannels>
__device__ void read_parameters(const void* data, bool is_float, unsigned channel, float otherwise,
                                float (&values)[kChannels]) {
  if (data == nullptr) {
#pragma unroll
    for (int k = 0; k < kChannels; ++k) values[k] = otherwise;
  } else if (is_float) {
#pragma unroll
    for (int k = 0; k < kChannels; ++k) values[k] = ((const float*)data)[channel + k];
  } else {
    Bits bits[kChannels];
#pragma unroll
    for (int k = 0; k < kChannels; ++k) bits[k] = ((const Bits*)data)[channel + k];
#pragma unroll
    for (int k = 0; k < kChannels; ++k) values[k] = Type::read(bits[k]);
  }
}

__device__ float weight_of(const GroupNormCall& call, unsigned channel) {
  return read_parameter(call.weight, call.is_weight_float, channel, 1);
}

__device__ float bias_of(const GroupNormCall& call, unsigned channel) {
  return read_parameter(call.bias, call.is_bias_float, channel, 0);
}

// Joins what so many lanes of a warp found, a power of two; each of them has the result.
template <class Part>
__device__ void join_lanes(Part& part, unsigned lanes) {
  for (unsigned distance = lanes / 2; distance > 0; distance /= 2) {
    Part other;
#pragma unroll
    for (unsigned j = 0; j < sizeof(Part) / sizeof(float); ++j) {
      other.floats[j] = __shfl_xor_sync(~0u, part.floats[j], distance);
    }
    part.take(other);
  }
}

// Threads that join a group's channels: a warp, or the part of one that lets the block's groups all
// be joined at once. A power of two.
__device__ unsigned group_threads(unsigned groups) {
  unsigned threads = 32;
  while (threads > 1 && threads * groups > blockDim.x) threads /= 2;
  return threads;
}

// Joins what the lanes of each slot found, in a fixed order; lane 0 has the result. Every thread of
// the block must come here. A Part is some floats and knows how to take in another.
template <bool kIsLast, class Part, int kChannels>
__device__ void join(const GroupNormCall& call, unsigned lane, Part (&parts)[kChannels],
                     float* scratch) {
  constexpr unsigned kFloats = sizeof(Part) / sizeof(float);
  const GroupNormSpread& spread = call.spread;
  if constexpr (kIsLast) {
    // The upper half of the lanes hands over to the lower one, until one is left.
    const unsigned thread = threadIdx.x, handed = spread.slots * (spread.lanes / 2);
    for (unsigned lanes = spread.lanes; lanes > 1;) {
      const unsigned half = (lanes + 1) / 2, from = thread - half * spread.slots;
      if (lane >= half && lane < lanes) {
#pragma unroll
        for (int k = 0; k < kChannels; ++k) {
#pragma unroll
          for (unsigned j = 0; j < kFloats; ++j) {
            scratch[(k * kFloats + j) * handed + from] = parts[k].floats[j];
          }
        }
      }
      __syncthreads();
      if (lane < lanes - half) {
#pragma unroll
        for (int k = 0; k < kChannels; ++k) {
          Part other;
#pragma unroll
          for (unsigned j = 0; j < kFloats; ++j) {
            other.floats[j] = scratch[(k * kFloats + j) * handed + thread];
          }
          parts[k].take(other);
        }
      }
      __syncthreads();
      lanes = half;
    }
    return;
  }
  join_lanes(parts[0], min(spread.lanes, 32u));
  if (spread.lanes <= 32) return;
  const unsigned warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (unsigned j = 0; j < kFloats; ++j) scratch[warp * kFloats + j] = parts[0].floats[j];
  }
  __syncthreads();
  if (lane == 0) {
    for (unsigned other = 1; other < spread.lanes / 32; ++other) {
      Part part;
#pragma unroll
      for (unsigned j = 0; j < kFloats; ++j) {
        part.floats[j] = scratch[(warp + other) * kFloats + j];
      }
      parts[0].take(part);
    }
  }
  __syncthreads();
}

// What the gradient of a group's numbers is less by, from the sums over its channels, each times
// its weight: a constant, and a multiple of the distance from the mean.
__device__ float2 slopes_of(const GroupNormCall& call, unsigned group, float sum, float along) {
  const float numbers = (float)(call.channels / call.groups) * call.positions;
  const float scale = call.rstd[group] / numbers;
  return {scale * sum, scale * along * call.rstd[group]};
}

// The kernels of pieces of 16 and of 8 bytes, and of one number.
constexpr int n = sizeof(Bits);

#define GROUP_NORM_KERNEL(name, threads, blocks, ...)                 \
  extern "C" __global__ void __launch_bounds__(threads, blocks)       \
      group_norm_##name(const __grid_constant__ GroupNormCall call) { \
    wait_for_inputs();                                                \
    let_next_start();                                                 \
    __VA_ARGS__(call);                                                \
  }
// One for channels that are first in memory, and one for channels that are last.
#define GROUP_NORM(name, bytes, threads, blocks)                                 \
  GROUP_NORM_KERNEL(name##_##bytes##_first, threads, blocks, name<bytes, false>) \
  GROUP_NORM_KERNEL(name##_##bytes##_last, threads, blocks, name<bytes, true>)
