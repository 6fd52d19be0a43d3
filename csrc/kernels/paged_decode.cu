// Attention of few queries over the pages of a cache, limited by how fast that is read. Compiled
// when the package is built (cmake/compile_kernels.py) for each type of query and cache;
// paged_decode_cuda.cpp launches it.
//
// All units of all sequences and heads of keys are one line, of which each block has an equal
// share: of one sequence or several, and of long ones several blocks have a part each; a beginning
// counts as a unit, since it takes as long. Within a block each warp reads tiles of its own, which
// are on their way while others are computed, so that no warp waits for another before the end of a
// sequence. Flash-decoding (Dao et al., 2023) with the even division of Stream-K (Osama et al.,
// 2023). Sums are in the same order whichever block ends last.

#include "paged_attend.cuh"

template <class Query, class Cache, int kSize, int kRows>
struct Decode : PagedAttend<Query, Cache, kSize, kRows> {
  using Base = PagedAttend<Query, Cache, kSize, kRows>;
  using Base::attend;
  using Base::Base;
  using Base::base;
  using Base::call;
  using Base::column_of;
  using Base::find_bounds;
  using Base::first;
  using Base::head_kv;
  using Base::index;
  using Base::kGroups;
  using Base::kSteps;
  using Base::lane;
  using Base::last;
  using Base::load_queries;
  using Base::memory;
  using Base::out;
  using Base::row_maxima;
  using Base::row_start;
  using Base::row_sums;
  using Base::rows;
  using Base::send_first_tiles;
  using Base::sequence;
  using Base::start_rows;
  using Base::sum;
  using Base::warp;
  using Base::without_base;
  static constexpr int kPartialNumbers = kRows * (kSize + 2);

  // Where a warp's sums of a row are, [kRows][kSize] in the place of its tiles: so that the rows of
  // four lanes, each of which has two, are in different banks.
  __device__ float* sum_at(int of_warp, int row, int column) const {
    return (float*)(memory + of_warp * call.stages * Base::Tiles::kStageBytes) + row * kSize +
           (column ^ row / 2 % 4 * 8);
  }

  __device__ void put_sums() {
    // Addresses of here would take registers from the loop over keys, if they did not depend on
    // what is known only behind it.
    unsigned own_lane = lane;
    keep(own_lane);
    const int lane_row = own_lane / 4, lane_column = own_lane % 4;
    __syncwarp();
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 8 * group + 2 * lane_column + i;
        float all = sum[group][i];
        for (int step = 4; step < kLanes; step *= 2) all += __shfl_xor_sync(~0u, all, step);
        if (lane_row == 0) {
          const bool is_empty = without_base >> (2 * group + i) & 1;
          row_maxima[warp * kRows + row] = is_empty ? minus_infinity() : base[group][i];
          row_sums[warp * kRows + row] = all;
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          *sum_at(warp, row, column_of(step, i, lane_row)) = out[group][step][i];
          *sum_at(warp, row, column_of(step, i + 2, lane_row)) = out[group][step][i + 2];
        }
      }
    }
    __syncthreads();
  }

  // Four numbers of a row, weighed sums of values, and the sum of the weights, 2^(score - highest).
  struct Sums {
    float highest = minus_infinity(), sum = 0, values[4] = {};

    __device__ void add(float other_highest, float other_sum, const float4& other) {
      const float higher = fmaxf(highest, other_highest);
      const float base = higher == minus_infinity() ? 0 : higher;
      const float mine = power_of_2(highest - base), theirs = power_of_2(other_highest - base);
      sum = sum * mine + other_sum * theirs;
      const float others[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) values[k] = values[k] * mine + others[k] * theirs;
      highest = higher;
    }
  };

  __device__ Sums sums_of_warps(int row, int column) const {
    Sums sums;
    for (int i = 0; i < kPagedWarps; ++i) {
      sums.add(row_maxima[i * kRows + row], row_sums[i * kRows + row],
               *(const float4*)sum_at(i, row, column));
    }
    return sums;
  }

  __device__ void write(int row, int column, Sums sums) const {
    const int query = (row_start + row) / call.work.group;
    const int head = head_kv * call.work.group + (row_start + row) % call.work.group;
    if (call.sinks != nullptr) sums.add(call.sinks[head] * kLog2E, 1, {0, 0, 0, 0});
    float share = sums.sum == 0 ? 0 : 1 / sums.sum;
    if (call.descale_v != nullptr) share *= call.descale_v[head_kv * call.descale_v_step];
    const float scaled[4] = {sums.values[0] * share, sums.values[1] * share, sums.values[2] * share,
                             sums.values[3] * share};
    const long long token = call.work.cu_seqlens_q == nullptr
                                ? (long long)index * call.work.queries + query
                                : sequence.first_query + query;
    auto* to = (typename Query::Bits*)call.out + token * call.out_token + head * kSize + column;
    *(Piece<Query, 4>*)to = Piece<Query, 4>::of(scaled);
    if (call.lse != nullptr && column == 0) {
      const long long in_lse = call.work.cu_seqlens_q == nullptr
                                   ? index * call.lse_batch + query * call.lse_token
                                   : token * call.lse_token;
      call.lse[in_lse + head * call.lse_head] =
          sums.sum == 0 ? minus_infinity() : (sums.highest + log2f(sums.sum)) * kLn2;
    }
  }

  __device__ float* partial_at(long long number) const {
    return call.partials + number * kPartialNumbers;
  }

  __device__ void put_partial(long long number) const {
    float* to = partial_at(number);
    for (int i = threadIdx.x; i < rows * (kSize / 4); i += kThreads) {
      const int row = i / (kSize / 4), column = i % (kSize / 4) * 4;
      const Sums sums = sums_of_warps(row, column);
      *(float4*)(to + row * kSize + column) = {sums.values[0], sums.values[1], sums.values[2],
                                               sums.values[3]};
      if (column == 0) {
        to[kRows * kSize + row] = sums.highest;
        to[kRows * kSize + kRows + row] = sums.sum;
      }
    }
  }

  // Of blocks first_block, where the part begins, to last_block.
  __device__ void write_all(int first_block, int last_block) const {
    for (int i = threadIdx.x; i < rows * (kSize / 4); i += kThreads) {
      const int row = i / (kSize / 4), column = i % (kSize / 4) * 4;
      Sums sums;
      for (int block = first_block; block <= last_block; ++block) {
        const float* from = partial_at(2LL * block + (block == first_block));
        sums.add(from[kRows * kSize + row], from[kRows * kSize + kRows + row],
                 *(const float4*)(from + row * kSize + column));
      }
      write(row, column, sums);
    }
  }

  // Whether all other blocks of a part have put theirs.
  __device__ bool is_last(int first_block, int last_block) const {
    __shared__ int before;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) before = atomicAdd(call.plan + first_block, 1);
    __syncthreads();
    const bool is_last = before == last_block - first_block;
    if (is_last) {
      __threadfence();
      if (threadIdx.x == 0) call.plan[first_block] = 0;  // for the next call with this plan
    }
    return is_last;
  }

  // By a plan that was made for something else nothing would be right: that is NaN.
  __device__ bool has_its_plan() const {
    bool is_same = true;
#pragma unroll
    for (int i = 0; i < kPagedHead; ++i) {
      is_same &= call.plan[kPagedCounters + i] == paged_head(call.work, i);
    }
    if (is_same) return true;
    const bool is_packed = call.work.cu_seqlens_q != nullptr;
    const long long tokens = is_packed ? call.work.cu_seqlens_q[call.work.batch]
                                       : (long long)call.work.batch * call.work.queries;
    const float nan = __uint_as_float(0x7fc00000);
    for (long long i = (long long)blockIdx.x * kThreads + threadIdx.x; i < tokens * call.out_token;
         i += (long long)gridDim.x * kThreads) {
      ((typename Query::Bits*)call.out)[i] = Query::write(nan);
    }
    return false;
  }

  // The last with sums[index] <= before. Each lane looks at one of 32 places where it may be.
  __device__ int sequence_of(const int* sums, int before) const {
    int low = 0, high = call.work.batch;
    while (high - low > 1) {
      const int step = (high - low + kLanes - 1) / kLanes, mine = low + (lane + 1) * step;
      const bool is_up_to_it = mine < high && sums[mine] <= before;
      low += __popc(__ballot_sync(~0u, is_up_to_it)) * step;
      high = min(high, low + step);
    }
    return low;
  }

  __device__ void run() {
    // Before the plan is checked, so that its words come at once.
    const int* sums = call.plan + kPagedSums;
    const long long heads = call.heads_kv, all = sums[call.work.batch] * heads;
    if (!has_its_plan()) return;
    const int blocks = (int)min((long long)gridDim.x, all), block = blockIdx.x;
    if (block >= blocks) return;
    const long long begin = block * all / blocks, end = (block + 1LL) * all / blocks;
    for (long long at = begin; at < end;) {
      index = sequence_of(sums, (int)(at / heads));
      sequence = PagedSequence(call.work, index);
      const PagedSpan span(call.work, sequence);
      const long long in_sequence = at - sums[index] * heads;
      const int in_part = (int)(in_sequence % span.cost());
      const int part = (int)(in_sequence / span.cost());
      head_kv = part / span.row_blocks;
      row_start = part % span.row_blocks * kRows;
      rows = min(sequence.queries * call.work.group - row_start, kRows);
      const long long part_begin = at - in_part, part_end = part_begin + span.cost();
      // Whose share would begin with a part's beginning, or before its first unit, has all of it.
      const bool is_begun_here = in_part <= kPagedBeginning;
      if (is_begun_here && end - part_begin <= kPagedBeginning) return;
      const long long stop = min(end, part_end);
      first = span.first + (is_begun_here ? 0 : in_part - kPagedBeginning);
      last = span.first + (int)(stop - part_begin) - kPagedBeginning;
      find_bounds();
      send_first_tiles();
      load_queries();
      start_rows();
      __syncthreads();
      attend();
      put_sums();
      if (is_begun_here && part_end <= end) {
        for (int i = threadIdx.x; i < rows * (kSize / 4); i += kThreads) {
          const int row = i / (kSize / 4), column = i % (kSize / 4) * 4;
          write(row, column, sums_of_warps(row, column));
        }
      } else {
        // The block of a unit is the last one that begins at it or before.
        const int first_block = (int)(((part_begin + kPagedBeginning + 1) * blocks - 1) / all);
        const int last_block = (int)((part_end * blocks - 1) / all);
        put_partial(2LL * block + is_begun_here);
        if (is_last(first_block, last_block)) write_all(first_block, last_block);
      }
      if (end - stop <= kPagedBeginning) return;  // as above, without looking for the part
      __syncthreads();
      at = stop;
    }
  }
};

// Aligned as PagedTiles needs it.
struct alignas(128) PagedMemory {
  unsigned char bytes[128];
};

// kBlocks at once on each multiprocessor.
#define PAGED_DECODE(name, Query, Cache, size, rows, kBlocks)                               \
  extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)                           \
      paged_decode_##name##_##size##_##rows(const __grid_constant__ PagedDecodeCall call) { \
    extern __shared__ PagedMemory shared[];                                                 \
    Decode<Query, Cache, size, rows>(call, shared->bytes).run();                            \
  }
#define PAGED_DECODES(name, Query, Cache)      \
  PAGED_DECODE(name, Query, Cache, 64, 8, 4)   \
  PAGED_DECODE(name, Query, Cache, 64, 16, 3)  \
  PAGED_DECODE(name, Query, Cache, 64, 32, 3)  \
  PAGED_DECODE(name, Query, Cache, 128, 8, 4)  \
  PAGED_DECODE(name, Query, Cache, 128, 16, 3) \
  PAGED_DECODE(name, Query, Cache, 128, 32, 2)

#define PAGED_DECODES_OF(name, Query, Cache) PAGED_DECODES(name, Query, Cache)
PAGED_DECODES_OF(KERNEL_NAME, KERNEL_QUERY, KERNEL_CACHE)
