// What a cluster's blocks keep of a group norm's numbers in shared memory, which is all that they
// have, and the sums of them. Tensor cores find these: of products with ones, and of squares.
//
// A unit is some of a sample's groups, or one where channels are first. Its steps in memory,
// positions or pieces, are cut into parts, a block of a cluster each. A block's pieces lie in
// shared memory in the order of steps, and eight that follow each other are the rows of a matrix:
// the diagonal of its product with its transpose has each row's sum of squares.
#pragma once

#include "arrivals.cuh"
#include "cluster.cuh"
#include "group_norm.cuh"
#include "mma.cuh"

constexpr unsigned kWarp = 32, kRows = 8, kRowsAtOnce = 4 * kRows;
constexpr int kNumbers = 16 / sizeof(Bits);  // of a piece
constexpr float kMostFloat = 3.4028235e38f;
using Vector = Piece<Type, kNumbers>;

// x / by, of x below 2^20.
__device__ unsigned divide_few(unsigned x, unsigned by) {
  return (unsigned)((x + 0.5f) * near_reciprocal((float)by));
}

// The sums of a row's numbers, as far as they are its first group's, and of the others, which are
// its second one's; and of their squares.
struct alignas(16) RowSums {
  float first, first_squares, second, second_squares;
};

// A block's part of a unit.
template <bool kIsLast>
struct PartOf {
  const GroupNormCall& call;
  unsigned unit, part, strip, group_channels;
  unsigned slot, lane;     // of the thread
  unsigned active;         // threads that have pieces
  unsigned first, steps;   // of the block in the unit
  unsigned pieces, count;  // of the block, and of the thread: one of every `active`
  unsigned pitch;          // pieces from a step to the next
  long long start;         // of the block in memory, in pieces

  __device__ PartOf(const GroupNormCall& call, unsigned unit, unsigned part)
      : call(call), unit(unit), part(part) {
    const GroupNormSpread& spread = call.spread;
    const unsigned sample = spread.strips == 1 ? unit : unit / spread.strips;
    strip = unit - sample * spread.strips;
    group_channels = call.channels / call.groups;
    lane = kIsLast ? divide_few(threadIdx.x, spread.slots) : threadIdx.x;
    slot = kIsLast ? threadIdx.x - lane * spread.slots : 0;
    active = spread.slots * spread.lanes;
    first = part * spread.stretch;
    steps = steps_of(part);
    pieces = steps * spread.slots;
    count = threadIdx.x < active ? divide_few(pieces + active - 1 - threadIdx.x, active) : 0;
    pitch = kIsLast ? call.channels / kNumbers : 1;
    start = ((long long)(kIsLast ? sample : unit) * all_steps() + first) * pitch +
            (kIsLast ? strip * spread.slots : 0);
  }

  __device__ unsigned all_steps() const {
    return kIsLast ? call.positions : group_channels * (call.positions / kNumbers);
  }
  __device__ unsigned steps_of(unsigned part) const {
    const unsigned stretch = call.spread.stretch;
    return min(stretch, all_steps() - part * stretch);
  }
  // Of the unit.
  __device__ unsigned groups() const {
    return kIsLast ? call.groups / call.spread.strips : 1;
  }
  // The numbers of each group in so many steps.
  __device__ float numbers(unsigned steps) const {
    return (float)steps * (kIsLast ? group_channels : kNumbers);
  }
};

// A block's shared memory.
struct RoomOf {
  uint4* kept;
  uint4* zero;         // a piece of zeros
  RowSums* rows;       // of each warp
  Arrivals* arrivals;  // of stages
  float2* own;         // mean and squared distances of the block's part of each group
  float2* stats;       // mean and 1 / deviation of each group
  float2* parameters;  // where channels are first: weight and bias of the unit's

  __device__ RoomOf(const GroupNormSpread& spread, unsigned groups) {
    extern __shared__ uint4 memory[];
    kept = memory;
    zero = memory + spread.kept / sizeof(uint4);
    rows = (RowSums*)(zero + 1);
    arrivals = (Arrivals*)(rows + blockDim.x / kWarp * kRows);
    own = (float2*)(arrivals + spread.stages);
    stats = own + groups;
    parameters = stats + groups;
  }
};

// Sends for all of the block's pieces, each thread for its own.
template <bool kIsLast>
__device__ void send_for_all(const PartOf<kIsLast>& part, const RoomOf& room) {
  const GroupNormSpread& spread = part.call.spread;
  if (threadIdx.x < spread.stages) room.arrivals[threadIdx.x].begin(blockDim.x);
  if (threadIdx.x == 0) *room.zero = {};
  __syncthreads();
  const unsigned step = spread.lanes * part.pitch;
  const uint4* from =
      (const uint4*)part.call.input + part.start + part.lane * part.pitch + part.slot;
  uint4* to = room.kept + threadIdx.x;
  unsigned i = 0;
  for (unsigned stage = 0; stage < spread.stages; ++stage) {
    const unsigned end = min(part.count, (stage + 1) * spread.turns);
#pragma unroll 4
    for (; i < end; ++i) {
      copy_async<16>(to, from);
      to += part.active;
      from += step;
    }
    room.arrivals[stage].count_copies();
  }
}

// The rows that a warp has: in a class all that have the same slots, and a share of these.
template <bool kIsLast>
struct WarpRows {
  unsigned group, left;  // of the lane's row the first group, and its numbers from there on
  unsigned piece, step;  // the lane's in four times eight rows, and to the next
  bool has_any;

  __device__ WarpRows(const PartOf<kIsLast>& part, unsigned row) {
    const GroupNormSpread& spread = part.call.spread;
    const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const unsigned share = divide_few(warp, spread.classes);
    const unsigned of_class = warp - share * spread.classes;
    has_any = share < spread.shares;
    step = kRowsAtOnce * spread.classes * spread.shares;
    piece = kRows * (of_class + spread.classes * (share * 4 + lane / kRows)) + lane % kRows;
    group = 0;
    left = kNumbers;
    if constexpr (kIsLast) {
      const unsigned number = of_class * kRows + row;
      const unsigned slot = number - divide_few(number, spread.slots) * spread.slots;
      group = divide_few(slot * kNumbers, part.group_channels);
      left = (group + 1) * part.group_channels - slot * kNumbers;
    }
  }
};

// What a warp has found for others to join: for each row, or where channels are first in all.
template <bool kIsLast>
__device__ void put_rows(const RoomOf& room, unsigned row, bool has_row, RowSums sums) {
  const unsigned warp = threadIdx.x / kWarp;
  if constexpr (kIsLast) {
    if (has_row) room.rows[warp * kRows + row] = sums;
  } else {
    sums.first = sum_within_warp(has_row ? sums.first : 0, kWarp);
    sums.first_squares = sum_within_warp(has_row ? sums.first_squares : 0, kWarp);
    if (threadIdx.x % kWarp == 0) room.rows[warp] = sums;
  }
}

// Adds up the numbers of all rows while they arrive, exactly but for what a sum of that size loses.
template <bool kIsLast>
__device__ void add_up_rows(const PartOf<kIsLast>& part, const RoomOf& room) {
  const GroupNormSpread& spread = part.call.spread;
  const unsigned lane = threadIdx.x % kWarp, row = lane / 4, number = lane % 4 * 2;
  const WarpRows<kIsLast> own(part, row);
  // Of the row's numbers, of which the lane has two, those of its first group.
  const unsigned mask = (number < own.left ? 0xffff : 0) | (number + 1 < own.left ? 0xffff0000 : 0);
  const unsigned ones = Type::write(1, 1), first_ones = ones & mask, second_ones = ones & ~mask;
  float squares[2][4] = {}, sums[2][4] = {};
  unsigned piece = own.piece, stage = 0;
  const unsigned stage_pieces = spread.turns * part.active;
  for (unsigned done = 0; done < part.pieces; done += own.step) {
    const unsigned needed = min(part.pieces, done + own.step);
    for (; stage * stage_pieces < needed; ++stage) room.arrivals[stage].wait();
    if (!own.has_any) continue;
    unsigned words[4];
    load_rows(words, piece < part.pieces ? room.kept + piece : room.zero);
    piece += own.step;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned near = words[2 * half], far = words[2 * half + 1];
      multiply_add<Type>(squares[half], {near & mask, near & ~mask, far & mask, far & ~mask}, near,
                         far);
      multiply_add<Type>(sums[half], {first_ones, second_ones, first_ones, second_ones}, near, far);
    }
  }
  // Of the diagonals.
  const bool is_odd = row % 2 > 0;
  const auto of = [&](const float (&found)[2][4], int i) {
    return is_odd ? found[0][i + 1] + found[1][i + 1] : found[0][i] + found[1][i];
  };
  put_rows<kIsLast>(room, row, number / 2 == row / 2,
                    {of(sums, 0), of(squares, 0), of(sums, 2), of(squares, 2)});
}

// The same of the numbers' distances from what `own` has as the means of their groups; the sums of
// distances times `scale`.
template <bool kIsLast>
__device__ void add_up_distances(const PartOf<kIsLast>& part, const RoomOf& room, float scale) {
  const unsigned row = threadIdx.x % kRows;
  const WarpRows<kIsLast> own(part, row);
  const float mean = room.own[own.group].x;
  const float next = room.own[min(own.group + 1, part.groups() - 1)].x;
  RowSums sums{};
  for (unsigned piece = own.piece; own.has_any && piece < part.pieces; piece += own.step) {
    float values[kNumbers];
    ((const Vector*)room.kept + piece)->read(values);
#pragma unroll
    for (int k = 0; k < kNumbers; ++k) {
      if (k < own.left) {
        const float distance = values[k] - mean;
        sums.first = fmaf(distance, scale, sums.first);
        sums.first_squares = fmaf(distance, distance, sums.first_squares);
      } else {
        const float distance = values[k] - next;
        sums.second = fmaf(distance, scale, sums.second);
        sums.second_squares = fmaf(distance, distance, sums.second_squares);
      }
    }
  }
#pragma unroll
  for (unsigned apart = kRows; apart < kWarp; apart *= 2) {
    sums.first += __shfl_xor_sync(~0u, sums.first, apart);
    sums.first_squares += __shfl_xor_sync(~0u, sums.first_squares, apart);
    sums.second += __shfl_xor_sync(~0u, sums.second, apart);
    sums.second_squares += __shfl_xor_sync(~0u, sums.second_squares, apart);
  }
  put_rows<kIsLast>(room, row, threadIdx.x % kWarp < kRows, sums);
}

// Threads that join a group's rows, side by side in a warp.
template <bool kIsLast>
constexpr unsigned kJoining = kIsLast ? 8 : kWarp;

// Calls `use` with each of the unit's groups, by so many threads, all of a warp at the same time:
// those that have none come with the last one.
template <unsigned kThreads, class Use>
__device__ void each_group(unsigned groups, const Use& use) {
  const unsigned step = blockDim.x / kThreads;
  const unsigned of_warp = threadIdx.x / kWarp * (kWarp / kThreads);
  for (unsigned first = of_warp; first < groups; first += step) {
    const unsigned group = first + threadIdx.x % kWarp / kThreads;
    use(min(group, groups - 1), group < groups && threadIdx.x % kThreads == 0);
  }
}

// A group's sums of all rows, by threads side by side: of numbers and of squares.
template <bool kIsLast>
__device__ float2 join_rows(const PartOf<kIsLast>& part, const RoomOf& room, unsigned group) {
  constexpr unsigned kThreads = kJoining<kIsLast>;
  const GroupNormSpread& spread = part.call.spread;
  unsigned first = 0, slots = 1, of_slot = blockDim.x / kWarp;
  bool begins_inside = false;  // of a slot
  if constexpr (kIsLast) {
    const unsigned channel = group * part.group_channels;
    first = channel / kNumbers;
    slots = (channel + part.group_channels - 1) / kNumbers - first + 1;
    begins_inside = channel % kNumbers > 0;
    of_slot = divide_few(kRows * spread.classes, spread.slots) * spread.shares;
  }
  float sum = 0, squares = 0;
  for (unsigned i = threadIdx.x % kThreads; i < of_slot; i += kThreads) {
    const RowSums* row = room.rows + i * (kIsLast ? spread.slots : 1) + first;
    for (unsigned slot = 0; slot < slots; ++slot) {
      const RowSums found = row[slot];
      const bool is_second = begins_inside && slot == 0;
      sum += is_second ? found.second : found.first;
      squares += is_second ? found.second_squares : found.first_squares;
    }
  }
  return {sum_within_warp(sum, kThreads), sum_within_warp(squares, kThreads)};
}

// Mean and squared distances of the block's part of each group, which the cluster's blocks load.
// Where squares are much larger than these distances, or no numbers, digits were lost: then all
// numbers are gone through once more.
template <bool kIsLast>
__device__ void find_own(const PartOf<kIsLast>& part, const RoomOf& room) {
  constexpr float kFar = 16;  // a mean's square, over the variance
  const float count = part.numbers(part.steps), share = near_reciprocal(count);
  bool is_lost = false;
  __syncthreads();
  each_group<kJoining<kIsLast>>(part.groups(), [&](unsigned group, bool is_one) {
    const float2 sums = join_rows(part, room, group);
    const float mean = sums.x * share, left = fmaf(-sums.x, mean, sums.y);
    is_lost |= !(kFar * left > sums.x * mean && left <= kMostFloat);
    if (!is_one) return;
    // What all numbers are near to, if it is one.
    const Bits any = ((const Bits*)room.kept)[kIsLast ? group * part.group_channels : 0];
    const float center = fabsf(mean) <= kMostFloat ? mean : Type::read(any);
    show_to_cluster(room.own + group, {center, left});
  });
  if (!__syncthreads_or(is_lost)) return;
  // A power of two, 1 / count or less: sums of large numbers stay finite.
  const float scale = __uint_as_float((95 + __clz((unsigned)count - 1)) << 23);
  add_up_distances(part, room, scale);
  __syncthreads();
  each_group<kJoining<kIsLast>>(part.groups(), [&](unsigned group, bool is_one) {
    const float2 sums = join_rows(part, room, group);
    if (!is_one) return;
    const float distance = sums.x * near_reciprocal(count * scale);
    const float left = fmaf(-count * distance, distance, sums.y);
    // What is infinite, or no number, stays so.
    show_to_cluster(room.own + group,
                    {room.own[group].x + distance, sums.y <= kMostFloat ? fmaxf(left, 0) : sums.y});
  });
}

// Mean and 1 / deviation of the unit's groups, from all its parts, each by one of a few threads.
// Whether a mean is so far from zero that it has to be taken off before anything else is done.
template <bool kIsLast>
__device__ bool find_stats(const PartOf<kIsLast>& part, const RoomOf& room) {
  constexpr unsigned kThreads = 8;  // as many as a cluster has blocks
  constexpr float kFar = 4096;      // a mean's square, over the variance
  const GroupNormCall& call = part.call;
  const unsigned lane = threadIdx.x % kThreads;
  const bool has = lane < call.spread.stretches;
  const float numbers = has ? part.numbers(part.steps_of(lane)) : 0;
  const float share = near_reciprocal(part.numbers(part.all_steps()));
  bool is_far = false;
  each_group<kThreads>(part.groups(), [&](unsigned group, bool is_one) {
    const float2 found = has ? load_from_block(room.own + group, lane) : float2{};
    const float base = __shfl_sync(~0u, found.x, threadIdx.x % kWarp / kThreads * kThreads);
    const float distance = has ? found.x - base : 0, weighed = numbers * distance;
    const float apart = sum_within_warp(weighed, kThreads);
    const float squares = sum_within_warp(fmaf(weighed, distance, found.y), kThreads);
    // What is infinite, or no number, stays so.
    const float off = apart * share, left = fmaf(-apart, off, squares);
    const float variance = (squares <= kMostFloat ? fmaxf(left, 0) : squares) * share;
    const float mean = base + off, rstd = rsqrtf(variance + call.eps);
    is_far |= !(mean * mean <= kFar * variance);
    if (!is_one) return;
    room.stats[group] = {mean, rstd};
    if (call.mean == nullptr || part.part > 0) return;
    const unsigned at = part.unit * part.groups() + group;
    call.mean[at] = mean;
    call.rstd[at] = rstd;
  });
  return __syncthreads_or(is_far);
}
