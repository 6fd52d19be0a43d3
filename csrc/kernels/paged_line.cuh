// The line of all units of a call's work, if there were one head of keys: which sequence has a
// unit, by a plan's sums or by one look at all lengths.
#pragma once

#include "paged_work.cuh"

// Of blocks of kRows rows, for a whole warp, whose lanes get the same.
template <int kRows>
struct PagedLine {
  static constexpr int kLanes = 32;

  const PagedDecodeCall& call;
  const unsigned lane;

  // A sequence, how many units come before it and with it, and its length.
  struct Sequence {
    int index, before, up_to, length;
  };

  // Of a sequence that may be there or not.
  __device__ int length_of(int index) const {
    return index < call.work.batch ? call.work.seq_lens_kv[index] : 0;
  }
  __device__ int units_of(int index, int length) const {
    if (index >= call.work.batch) return 0;
    const PagedSpan span(call.work, PagedSequence(call.work, index, length), kRows);
    return span.cost() * span.row_blocks;
  }

  // From a sequence to the one that unit `at`, of all heads, is in: itself, or one behind it.
  __device__ void go_on(Sequence& sequence, long long at) const {
    while (at >= (long long)sequence.up_to * call.heads_kv &&
           sequence.index + 1 < call.work.batch) {
      const int index = sequence.index + 1, length = length_of(index);
      sequence = {index, sequence.up_to, sequence.up_to + units_of(index, length), length};
    }
  }

  struct Planned {
    const PagedLine& line;

    __device__ int units() const {
      return line.call.plan[kPagedSums + line.call.work.batch];
    }
    // The last with sums[index] <= unit. Each lane looks at one of 32 places where it may be.
    __device__ Sequence find(int unit) const {
      const int* sums = line.call.plan + kPagedSums;
      int low = 0, high = line.call.work.batch;
      while (high - low > 1) {
        const int step = (high - low + kLanes - 1) / kLanes, mine = low + (line.lane + 1) * step;
        const bool is_up_to_it = mine < high && sums[mine] <= unit;
        low += __popc(__ballot_sync(~0u, is_up_to_it)) * step;
        high = min(high, low + step);
      }
      return {low, sums[low], sums[low + 1], line.call.work.seq_lens_kv[low]};
    }
  };

  // Each lane has kEach sequences that follow each other.
  template <int kEach>
  struct Counted {
    unsigned lane;
    int lengths[kEach], up_to[kEach];

    __device__ explicit Counted(const PagedLine& line) : lane(line.lane) {
      int own = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) lengths[i] = line.length_of(kEach * lane + i);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        own += line.units_of(kEach * lane + i, lengths[i]);
        up_to[i] = own;
      }
      int up_to_lane = own;
#pragma unroll
      for (int step = 1; step < kLanes; step *= 2) {
        const int other = __shfl_up_sync(~0u, up_to_lane, step);
        if (lane >= step) up_to_lane += other;
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) up_to[i] += up_to_lane - own;
    }

    __device__ int units() const {
      return __shfl_sync(~0u, up_to[kEach - 1], kLanes - 1);
    }
    // There is such a unit. Each lane finds what were its own, if it were the one that has it.
    __device__ Sequence find(int unit) const {
      const int of_lane = __popc(__ballot_sync(~0u, up_to[kEach - 1] <= unit));
      const int before_lane = __shfl_up_sync(~0u, up_to[kEach - 1], 1);
      Sequence found;
#pragma unroll
      for (int i = kEach - 1; i >= 0; --i) {
        const int before = i > 0 ? up_to[i - 1] : lane > 0 ? before_lane : 0;
        if (i == kEach - 1 || unit < up_to[i]) found = {i, before, up_to[i], lengths[i]};
      }
      return {kEach * of_lane + __shfl_sync(~0u, found.index, of_lane),
              __shfl_sync(~0u, found.before, of_lane), __shfl_sync(~0u, found.up_to, of_lane),
              __shfl_sync(~0u, found.length, of_lane)};
    }
  };
};
