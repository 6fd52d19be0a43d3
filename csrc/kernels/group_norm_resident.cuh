// What the kernels of group norm share whose blocks all run at the same time, each of which keeps a
// part of the numbers in shared memory until all others have read theirs.
//
// A sample's numbers are one stretch of memory, channels last; so are a group's, channels first.
// Such a unit is cut into as many parts as there are blocks for it.
#pragma once

#include "cache_policy.cuh"
#include "grid_barrier.cuh"
#include "group_norm.cuh"
#include "silu_pairs.cuh"

constexpr unsigned kWarp = 32;

using Silus = SiluPairs<Type::kDigits>;

// What a thread keeps, of so many tensors.
template <int kBytes, unsigned kOfTensors>
struct Keeping {
  static constexpr unsigned kTensors = kOfTensors;
  static constexpr int kPieceBytes = kBytes, kWidth = kBytes / sizeof(Bits);
  // Pieces of each tensor that a thread has sent for and not yet used.
  static constexpr unsigned kAhead = kGroupNormAhead / kTensors;
  using Vector = Piece<Type, kWidth>;

  const GroupNormCall& call;
  unsigned unit, part;
  Vector* kept;

  __device__ Keeping(const GroupNormCall& call) : call(call) {
    extern __shared__ uint4 memory[];
    kept = (Vector*)memory + threadIdx.x;
    unit = blockIdx.x / call.spread.stretches;
    part = blockIdx.x - unit * call.spread.stretches;
  }
  __device__ unsigned group_channels() const {
    return call.channels / call.groups;
  }
  // Where the piece of a turn is in shared memory, from `kept` on. Those beyond the ones that stay
  // take turns, if there are any.
  template <bool kStreams>
  __device__ unsigned place(unsigned i) const {
    const unsigned staying = call.spread.staying;
    const bool is_kept = !kStreams || i < staying;
    return (is_kept ? i : staying + (i - staying) % kAhead) * kTensors * blockDim.x;
  }
};

// The pieces of a block: the threads have them in turns, in the order of memory. Channels last, a
// thread's pieces all are of the same channels.
template <int kBytes, bool kIsLast, unsigned kTensors>
struct Part : Keeping<kBytes, kTensors> {
  static constexpr int kWidth = kBytes / sizeof(Bits);
  static constexpr int kChannels = kIsLast ? kWidth : 1;  // of a piece

  unsigned active;       // threads that have pieces
  unsigned turns;        // of the block
  unsigned count;        // of the thread's pieces: one a turn, but for the last one perhaps
  unsigned first_piece;  // of the thread in the unit, channels first
  long long start;       // where that is in memory

  __device__ Part(const GroupNormCall& call) : Keeping<kBytes, kTensors>(call) {
    const GroupNormSpread& spread = call.spread;
    const unsigned slots = kIsLast ? spread.slots : 1;  // pieces of a step
    active = slots * spread.lanes;
    const unsigned first = this->part * spread.stretch;
    const unsigned pieces = (min(all_steps(), first + spread.stretch) - first) * slots;
    turns = (pieces + active - 1) / active;
    const bool has_last = threadIdx.x < pieces - (turns - 1) * active;
    count = threadIdx.x < active ? turns - (has_last ? 0 : 1) : 0;
    first_piece = first + threadIdx.x;
    start = ((long long)this->unit * all_steps() + first) * slots + threadIdx.x;
  }

  // Steps in memory: positions of all channels, or pieces of a group.
  __device__ unsigned all_steps() const {
    const GroupNormCall& call = this->call;
    return kIsLast ? call.positions : this->group_channels() * (call.positions / kWidth);
  }
  // Of a unit.
  __device__ unsigned groups() const {
    return kIsLast ? this->call.groups : 1;
  }
  // The first of the thread's, channels last.
  __device__ unsigned channel() const {
    return threadIdx.x % this->call.spread.slots * kWidth;
  }
  __device__ bool has(unsigned i) const {
    return i < count;
  }
  __device__ long long offset(unsigned i) const {
    return start + (long long)i * active;
  }
};

// Sends for the thread's piece of a turn, of each tensor.
template <bool kStreams, class Pieces>
__device__ void send_for(const Pieces& pieces, const void* const (&tensors)[Pieces::kTensors],
                         unsigned i, unsigned long long policy) {
  using Vector = typename Pieces::Vector;
  const unsigned place = pieces.template place<kStreams>(i);
  const long long offset = pieces.offset(i);
#pragma unroll
  for (unsigned t = 0; t < Pieces::kTensors; ++t) {
    copy_async_by<Pieces::kPieceBytes>(pieces.kept + (place + t * blockDim.x),
                                       (const Vector*)tensors[t] + offset, policy);
  }
}

// Reads the thread's pieces; `use` gets every turn, and where its piece is in shared memory, if the
// thread has one. Before that `begin` gets the first one. Turns are the same for all threads, so
// that what belongs to them is computed once for a warp.
template <bool kStreams, class Pieces, class Begin, class Use>
__device__ void read_all(const Pieces& pieces, const void* const (&tensors)[Pieces::kTensors],
                         const Begin& begin, const Use& use) {
  constexpr unsigned kAhead = Pieces::kAhead;
  // What stays need not be in the L2 cache, so that more of the rest is.
  const auto usual = l2_policy(false), once = l2_policy(true);
  const auto send = [&](unsigned i) {
    if (pieces.has(i)) {
      const bool is_once = kStreams && i < pieces.call.spread.staying;
      send_for<kStreams>(pieces, tensors, i, is_once ? once : usual);
    }
    commit_copies();
  };
#pragma unroll 1
  for (unsigned i = 0; i < kAhead; ++i) send(i);
  wait_for_all_but<kAhead - 1>();
  begin(pieces.kept);
#pragma unroll 1
  for (unsigned i = 0; i < pieces.turns; ++i) {
    wait_for_all_but<kAhead - 1>();
    use(i, pieces.kept + pieces.template place<kStreams>(i));
    send(i + kAhead);
  }
}

// Comes to the thread's pieces once more, from the last to the first: those that were read last
// are there still, and make room for those before them.
template <class Pieces, class Use>
__device__ void read_back(const Pieces& pieces, const void* const (&tensors)[Pieces::kTensors],
                          const Use& use) {
  constexpr unsigned kAhead = Pieces::kAhead;
  const unsigned staying = pieces.call.spread.staying;
  const auto once = l2_policy(true);
  unsigned i = pieces.turns;
  for (; i > staying; --i) {
    wait_for_all_but<kAhead - 1>();
    if (pieces.has(i - 1)) use(i - 1, pieces.kept + pieces.template place<true>(i - 1));
    if (i > staying + kAhead && pieces.has(i - 1 - kAhead)) {
      send_for<true>(pieces, tensors, i - 1 - kAhead, once);
    }
    commit_copies();
  }
  for (; i > 0; --i) {
    if (pieces.has(i - 1)) {
      use(i - 1, pieces.kept + (i - 1) * Pieces::kTensors * blockDim.x);
    }
  }
}
