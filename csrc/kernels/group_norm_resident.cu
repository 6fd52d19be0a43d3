// Group norm that reads its numbers once, by one launch whose blocks all run at the same time.
// Compiled as group_norm_forward.cu is, whose kernels take three launches where groups are too
// large for a block.
//
// A sample's numbers are one stretch of memory, channels last; so are a group's, channels first.
// Such a unit is cut into as many parts as there are blocks for it. A block reads its part into
// shared memory and finds the moments of its groups; when all blocks have (grid_barrier.cuh) it
// joins those of its unit's parts, every block in the same order, and writes the norm. What does
// not fit is read again behind the barrier, the last of it first, which is in the L2 cache still.

#include "cache_policy.cuh"
#include "grid_barrier.cuh"
#include "group_norm_moments.cuh"

namespace {

constexpr unsigned kWarp = 32;
// Copies of a thread that are under way at the same time: a power of two.
constexpr unsigned kAhead = kGroupNormAhead;

// The pieces of a block: the threads have them in turns, in the order of memory. Channels last, a
// thread's pieces all are of the same channels.
template <int kBytes, bool kIsLast>
struct Part {
  static constexpr int kWidth = kBytes / sizeof(Bits);
  static constexpr int kChannels = kIsLast ? kWidth : 1;  // of a piece
  using Vector = Piece<Type, kWidth>;

  const GroupNormCall& call;
  unsigned unit, part;
  unsigned active;       // threads that have pieces
  unsigned count;        // of the thread's pieces
  unsigned first_piece;  // of the thread in the unit, channels first
  long long start;       // where that is in memory
  Vector* kept;

  __device__ Part(const GroupNormCall& call) : call(call) {
    const GroupNormSpread& spread = call.spread;
    extern __shared__ uint4 memory[];
    kept = (Vector*)memory + threadIdx.x;
    unit = blockIdx.x / spread.stretches;
    part = blockIdx.x - unit * spread.stretches;
    const unsigned slots = kIsLast ? spread.slots : 1;  // pieces of a step
    active = slots * spread.lanes;
    const unsigned first = part * spread.stretch;
    const unsigned pieces = (min(all_steps(), first + spread.stretch) - first) * slots;
    const bool has_some = threadIdx.x < active && threadIdx.x < pieces;
    count = has_some ? (pieces - threadIdx.x + active - 1) / active : 0;
    first_piece = first + threadIdx.x;
    start = ((long long)unit * all_steps() + first) * slots + threadIdx.x;
  }

  // Steps in memory: positions of all channels, or pieces of a group.
  __device__ unsigned all_steps() const {
    return kIsLast ? call.positions : group_channels() * (call.positions / kWidth);
  }
  __device__ unsigned group_channels() const {
    return call.channels / call.groups;
  }
  // Of a unit.
  __device__ unsigned groups() const {
    return kIsLast ? call.groups : 1;
  }
  // The first of the thread's channels, channels last.
  __device__ unsigned channel() const {
    return threadIdx.x % call.spread.slots * kWidth;
  }
  __device__ long long offset(unsigned i) const {
    return start + (long long)i * active;
  }
  // Where a piece is in shared memory. Those beyond the ones that stay take turns.
  __device__ Vector* place(unsigned i) const {
    const unsigned staying = call.spread.staying;
    return kept + (i < staying ? i : staying + (i - staying) % kAhead) * blockDim.x;
  }
  __device__ void send_for(const void* from, unsigned i, unsigned long long policy) const {
    copy_async_by<kBytes>(place(i), (const Vector*)from + offset(i), policy);
  }
};

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

// Reads all pieces, or writes and keeps their sum with the residual's.
template <bool kAdds, int kBytes, bool kIsLast, class Found>
__device__ void read_pieces(const GroupNormCall& call, const Part<kBytes, kIsLast>& part,
                            Found& found) {
  using Vector = typename Part<kBytes, kIsLast>::Vector;
  constexpr int kWidth = Part<kBytes, kIsLast>::kWidth;
  const auto* residual = (const Vector*)call.residual;
  // What stays need not be in the L2 cache, so that more of the rest is.
  const auto usual = l2_policy(false), once = l2_policy(true);
  const auto send = [&](unsigned i) {
    if (i < part.count) {
      part.send_for(call.input, i, i < call.spread.staying && call.spread.streams ? once : usual);
    }
    commit_copies();
  };
  for (unsigned i = 0; i < kAhead; ++i) send(i);
  Vector added[2];
  if constexpr (kAdds) {
#pragma unroll
    for (unsigned i = 0; i < 2; ++i) {
      if (i < part.count) added[i] = residual[part.offset(i)];
    }
  }
  for (unsigned i = 0; i < part.count; ++i) {
    wait_for_all_but<kAhead - 1>();
    Vector* own = part.place(i);
    float values[kWidth];
    own->read(values);
    if constexpr (kAdds) {
      added[0].add_to(values);
      added[0] = added[1];
      if (i + 2 < part.count) added[1] = residual[part.offset(i + 2)];
      // The norm is of what is written.
      const Vector sum = Vector::of(values);
      ((Vector*)call.sum)[part.offset(i)] = sum;
      *own = sum;
      sum.read(values);
    }
    found.take(values);
    send(i + kAhead);
  }
}

// The moments of the thread's channels by their groups, of which each takes a row of `all`. Every
// channel has as many numbers.
template <int kWidth>
__device__ void share_by_groups(const GroupNormCall& call, const PieceMoments<kWidth, true>& found,
                                unsigned channel, Moments* all) {
  const unsigned group_channels = call.channels / call.groups;
  unsigned left = group_channels - channel % group_channels;
  float channels = 0, mean = 0, squares = 0;
  all += threadIdx.x;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    const float share = near_reciprocal(channels + 1), distance = found.mean[k] - mean;
    squares += fmaf(distance * channels * found.count, distance * share, found.squares[k]);
    mean = fmaf(distance, share, mean);
    channels += 1;
    if (--left > 0 && k < kWidth - 1) continue;
    *all = {mean, squares, channels * found.count};
    all += blockDim.x;
    left = group_channels;
    channels = mean = squares = 0;
  }
}

// Joins the moments of so many parts, which `get` gives by their indices, by the threads of a warp
// in a fixed order: the first one's are of some numbers.
template <class Get>
__device__ Moments join_in_warp(unsigned parts, const Get& get) {
  const unsigned lane = threadIdx.x % kWarp;
  const float base = get(0).floats[0];
  float count = 0, apart = 0;
  for (unsigned i = lane; i < parts; i += kWarp) {
    const Moments part = get(i);
    count += part.floats[2];
    apart = fmaf(part.floats[2], part.floats[0] - base, apart);
  }
  count = sum_within_warp(count, kWarp);
  const float mean = base + sum_within_warp(apart, kWarp) / count;
  float squares = 0;
  for (unsigned i = lane; i < parts; i += kWarp) {
    const Moments part = get(i);
    const float distance = part.floats[0] - mean;
    squares += fmaf(part.floats[2] * distance, distance, part.floats[1]);
  }
  return {mean, sum_within_warp(squares, kWarp), count};
}

// Means of all parts of all groups of all units, then what belongs to them.
template <int kBytes, bool kIsLast>
__device__ float* part_of(const GroupNormCall& call, const Part<kBytes, kIsLast>& part,
                          unsigned group, unsigned index) {
  return call.partial + ((part.unit * part.groups() + group) * call.spread.stretches + index);
}

template <int kBytes, bool kIsLast>
__device__ void write_part(const GroupNormCall& call, const Part<kBytes, kIsLast>& part,
                           unsigned group, const Moments& moments) {
  float* to = part_of(call, part, group, part.part);
  to[0] = moments.floats[0];
  to[call.samples * call.groups * call.spread.stretches] = moments.floats[1];
}

// The moments of each of the unit's groups in this part, which other blocks read.
template <int kBytes, bool kIsLast, class Found>
__device__ void write_moments(const GroupNormCall& call, const Part<kBytes, kIsLast>& part,
                              const Room& room, const Found& found) {
  const unsigned warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  if constexpr (kIsLast) {
    constexpr unsigned kWidth = Part<kBytes, true>::kWidth;
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
    Moments all = found.moments(0);
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
__device__ void find_stats(const GroupNormCall& call, const Part<kBytes, kIsLast>& part,
                           float2* stats) {
  const unsigned stretch = call.spread.stretch, steps = part.all_steps();
  const unsigned numbers = kIsLast ? part.group_channels() : Part<kBytes, kIsLast>::kWidth;
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

// What the channels of a piece are multiplied by and what is added, with the mean in between.
template <int kBytes, bool kIsLast>
struct Parameters {
  static constexpr int kChannels = Part<kBytes, kIsLast>::kChannels;
  float centers[kChannels], factors[kChannels], shifts[kChannels];

  // Before the statistics are known, so that nothing waits for it behind them.
  __device__ void load(const GroupNormCall& call, const Part<kBytes, kIsLast>& part,
                       const Room& room) {
    if constexpr (kIsLast) {
      read_parameters(call.weight, call.is_weight_float, part.channel(), 1, factors);
      read_parameters(call.bias, call.is_bias_float, part.channel(), 0, shifts);
    } else {
      const unsigned count = part.group_channels(), first = part.unit % call.groups * count;
      for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
        room.parameters[i] = {weight_of(call, first + i), bias_of(call, first + i)};
      }
    }
  }
  __device__ void finish(const GroupNormCall& call, const Part<kBytes, kIsLast>& part,
                         const Room& room) {
    if constexpr (kIsLast) {
      const unsigned group_channels = part.group_channels();
      unsigned group = part.channel() / group_channels;
      unsigned left = (group + 1) * group_channels - part.channel();
#pragma unroll
      for (int k = 0; k < kChannels; ++k) {
        const float2 stats = room.stats[group];
        centers[k] = stats.x;
        factors[k] *= stats.y;
        if (--left > 0) continue;
        left = group_channels;
        group = min(group + 1, call.groups - 1);
      }
    } else {
      centers[0] = room.stats[0].x;
    }
  }
  // For the thread's piece of that number.
  __device__ void choose(const GroupNormCall& call, const Part<kBytes, kIsLast>& part,
                         const Room& room, unsigned i) {
    if constexpr (!kIsLast) {
      const unsigned row = call.positions / Part<kBytes, kIsLast>::kWidth;
      const float2 own = room.parameters[(part.first_piece + i * part.active) / row];
      factors[0] = own.x * room.stats[0].y;
      shifts[0] = own.y;
    }
  }
};

template <int kBytes, bool kIsLast>
__device__ void normalize(const GroupNormCall& call, const Part<kBytes, kIsLast>& part,
                          const Room& room, Parameters<kBytes, kIsLast>& parameters) {
  using Vector = typename Part<kBytes, kIsLast>::Vector;
  constexpr int kWidth = Part<kBytes, kIsLast>::kWidth;
  const unsigned staying = call.spread.staying;
  const auto once = l2_policy(true);
  const auto use = [&](unsigned i) {
    float values[kWidth];
    part.place(i)->read(values);
    parameters.choose(call, part, room, i);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const int c = kIsLast ? k : 0;
      values[k] =
          fmaf(values[k] - parameters.centers[c], parameters.factors[c], parameters.shifts[c]);
    }
    if (call.has_silu) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) values[k] = SiluOf<Type::kDigits>::of(values[k]).x;
    }
    Vector* to = (Vector*)call.out + part.offset(i);
    if (call.spread.streams) {
      store_once(to, Vector::of(values));
    } else {
      *to = Vector::of(values);
    }
  };
  const void* input = call.residual == nullptr ? call.input : call.sum;
  // The last pieces are there still, and make room for those before them.
  for (unsigned i = part.count; i > staying; --i) {
    wait_for_all_but<kAhead - 1>();
    use(i - 1);
    if (i > staying + kAhead) part.send_for(input, i - 1 - kAhead, once);
    commit_copies();
  }
  for (unsigned i = 0; i < min(staying, part.count); ++i) use(i);
}

template <int kBytes, bool kIsLast>
__device__ void resident(const GroupNormCall& call) {
  const Part<kBytes, kIsLast> part(call);
  const Room room(call, kIsLast);
  PieceMoments<Part<kBytes, kIsLast>::kWidth, kIsLast> found;
  if (call.residual == nullptr) {
    read_pieces<false>(call, part, found);
  } else {
    read_pieces<true>(call, part, found);
  }
  write_moments(call, part, room, found);
  const unsigned before = arrive_at_grid();
  Parameters<kBytes, kIsLast> parameters;
  parameters.load(call, part, room);
  wait_for_grid(before);
  find_stats(call, part, room.stats);
  __syncthreads();
  parameters.finish(call, part, room);
  normalize(call, part, room, parameters);
}

}  // namespace

GROUP_NORM(resident, 16, 1024, 1)
GROUP_NORM(resident, 8, 1024, 1)
