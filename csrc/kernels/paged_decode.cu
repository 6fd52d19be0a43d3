// Attention of few queries over the pages of a cache, limited by how fast that is read. Compiled
// when the package is built (cmake/compile_kernels.py) for each type of query and cache;
// paged_decode_cuda.cpp launches it.
//
// All units of all sequences and heads of keys are one line, of which each block has an equal
// share: of one sequence or several, and of long ones several blocks have a part each; a beginning
// counts as a unit, since it takes as long. Within a block each warp reads tiles of its own, which
// are on their way while others are computed, so that no warp waits for another before the end of a
// part; of 16 bits and few rows the first tiles of the next one are on their way while that is
// written. Of few sequences every block adds up the lengths by itself; of more a plan has the sums.
// Few sequences have clusters instead (paged_even.cuh).
// Flash-decoding (Dao et al., 2023) with the even division of Stream-K (Osama et al., 2023). Sums
// are in the same order whichever block ends last.

#include "paged_even.cuh"
#include "paged_line.cuh"
#include "paged_sums.cuh"
#include "threads.cuh"

// Of numbers that are not negative. Those of 64 bits take several times as long.
__device__ long long quotient(long long number, long long by) {
  const bool is_short = ((unsigned long long)(number | by) >> 32) == 0;
  return is_short ? (unsigned)number / (unsigned)by : number / by;
}

// For calls without a plan; those of a slot run one after the other. Zero between them.
__device__ int paged_counters[kPagedSlots][kPagedCounters];

template <class Query, class Cache, int kSize, int kRows>
struct Decode : PagedSums<Query, Cache, kSize, kRows, kPagedWarps> {
  using Base = PagedSums<Query, Cache, kSize, kRows, kPagedWarps>;
  using Base::attend;
  using Base::Base;
  using Base::call;
  using Base::find_bounds;
  using Base::first;
  using Base::kStageBytes;
  using Base::kSumBytes;
  using Base::kThreads;
  using Base::lane;
  using Base::last;
  using Base::load_queries;
  using Base::part;
  using Base::put_sums;
  using Base::send_first_tile;
  using Base::start_rows;
  using Base::start_tiles;
  using Base::sums_of_warps;
  using Base::warp;
  using Base::write;
  using typename Base::Sums;
  using Line = PagedLine<kRows>;
  using Sequence = typename Line::Sequence;
  // Whether a part's first tiles are sent while the one before is written. What that needs would
  // make the loop over keys longer, and of 8 bits its instructions take longer than the bytes.
  static constexpr bool kOverlaps = !Base::kIsFp8 && kRows == 8;
  static constexpr int kPartialNumbers = kRows * (kSize + 2);
  static constexpr int kSumStages = (kSumBytes + kStageBytes - 1) / kStageBytes;

  // Where in the line of all units a part lies.
  struct Place {
    long long begin, end;
    bool is_begun_here;  // whether this block has its first unit
  };

  long long all;  // how many units there are
  int blocks;     // that have a share of them
  long long end;  // of this block's
  Place place;    // of the part that it is at

  __device__ float* partial_at(long long number) const {
    return call.partials + number * kPartialNumbers;
  }

  __device__ void put_partial(const PagedPart& of, long long number) const {
    float* to = partial_at(number);
    for (int i = threadIdx.x; i < of.rows * (kSize / 4); i += kThreads) {
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
  __device__ void write_all(const PagedPart& of, int first_block, int last_block) const {
    // On their way together: the memory is far away. Of many rows a thread has several pieces, and
    // few blocks share a part. More registers would be taken from the loop.
    constexpr int kPieces = kRows / 8, kAtOnce = (kOverlaps && kSize == 64 ? 4 : 8) / kPieces;
    constexpr int kInRow = kSize / 4;
    for (int start = threadIdx.x; start < of.rows * kInRow; start += kPieces * kThreads) {
      Sums sums[kPieces];
      for (int of_these = first_block; of_these <= last_block; of_these += kAtOnce) {
        float highest[kAtOnce][kPieces], weights[kAtOnce][kPieces];
        float4 values[kAtOnce][kPieces];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int block = of_these + k;
          const float* from = partial_at(2LL * block + (block == first_block));
#pragma unroll
          for (int piece = 0; piece < kPieces; ++piece) {
            const int i = start + piece * kThreads, row = i / kInRow, column = i % kInRow * 4;
            const bool is_there = block <= last_block && row < of.rows;
            highest[k][piece] = is_there ? from[kRows * kSize + row] : minus_infinity();
            weights[k][piece] = is_there ? from[kRows * kSize + kRows + row] : 0;
            values[k][piece] =
                is_there ? *(const float4*)(from + row * kSize + column) : float4{0, 0, 0, 0};
          }
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          if (of_these + k > last_block) break;
#pragma unroll
          for (int piece = 0; piece < kPieces; ++piece) {
            sums[piece].add(highest[k][piece], weights[k][piece], values[k][piece]);
          }
        }
      }
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const int i = start + piece * kThreads;
        if (i < of.rows * kInRow) write(of, i / kInRow, i % kInRow * 4, sums[piece]);
      }
    }
  }

  // Whether all other blocks of a part have put theirs. One thread's fence is for all of its block,
  // behind the barrier: a fence of each takes longer.
  __device__ bool is_last(int first_block, int last_block) const {
    __shared__ int before;
    int* counters = call.counters == nullptr ? paged_counters[call.slot] : call.counters;
    __syncthreads();
    if (threadIdx.x == 0) {
      asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;"
                   : "=r"(before)
                   : "l"(counters + first_block), "r"(1)
                   : "memory");
    }
    __syncthreads();
    const bool is_last = before == last_block - first_block;
    if (is_last && threadIdx.x == 0) counters[first_block] = 0;  // for the next call with them
    return is_last;
  }

  // What put_sums() put: the result, or a share of it for the block that is the last to be done.
  __device__ void finish(PagedPart of, const Place& at) const {
    if (at.is_begun_here && at.end <= end) {
      for (int i = threadIdx.x; i < of.rows * (kSize / 4); i += kThreads) {
        const int row = i / (kSize / 4), column = i % (kSize / 4) * 4;
        write(of, row, column, sums_of_warps(row, column));
      }
      return;
    }
    // The block of a unit is the last one that begins at it or before.
    const int first_block = (int)quotient((at.begin + kPagedBeginning + 1) * blocks - 1, all);
    const int last_block = (int)quotient(at.end * blocks - 1, all);
    put_partial(of, 2LL * blockIdx.x + at.is_begun_here);
    if (is_last(first_block, last_block)) write_all(of, first_block, last_block);
  }

  // By a plan that was made for something else nothing would be right: that is NaN. `word`: what a
  // plan has for this lane.
  __device__ bool is_of_this(int word) const {
    bool is_same = true;
#pragma unroll
    for (int i = 0; i < kPagedHead; ++i) {
      is_same &= __shfl_sync(~0u, word, i) == paged_head(call.work, i);
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

  // What is needed again at a part's end: registers are for the loop over keys.
  struct Kept {
    PagedPart part;
    Place place;
    long long all, end;
    int blocks;
    Sequence sequence;
  };

  // Where this block's share begins, by a plan or the lengths; false: there is none. `word`: as
  // above.
  template <class Sequences>
  __device__ bool begin(const Sequences& sequences, int word, long long& at, Sequence& sequence) {
    const int units = sequences.units();
    if (call.plan != nullptr && !is_of_this(word)) return false;
    all = (long long)units * call.heads_kv;
    blocks = (int)min((long long)gridDim.x, all);
    const int block = blockIdx.x;
    if (block >= blocks) return false;
    end = quotient((block + 1) * all, blocks);
    at = quotient(block * all, blocks);
    sequence = sequences.find((int)quotient(at, (long long)call.heads_kv));
    return true;
  }

  // The part of `sequence` in which unit `at` is, and what of it from there on is this block's;
  // false: nothing.
  __device__ bool find_part(long long at, const Sequence& sequence) {
    const long long heads = call.heads_kv;
    part.index = sequence.index;
    part.sequence = PagedSequence(call.work, sequence.index, sequence.length);
    const PagedSpan span(call.work, part.sequence, kRows);
    const int number = (int)quotient(at - sequence.before * heads, span.cost());
    place.begin = sequence.before * heads + (long long)number * span.cost();
    place.end = place.begin + span.cost();
    const int in_part = (int)(at - place.begin);
    part.head_kv = number;
    part.row_start = 0;
    if (span.row_blocks > 1) {
      part.head_kv = number / span.row_blocks;
      part.row_start = number % span.row_blocks * kRows;
    }
    part.rows = min(part.sequence.queries * call.work.group - part.row_start, kRows);
    // Whose share would begin with a part's beginning, or before its first unit, has all of it.
    place.is_begun_here = in_part <= kPagedBeginning;
    if (place.is_begun_here && end - place.begin <= kPagedBeginning) return false;
    first = span.first + (place.is_begun_here ? 0 : in_part - kPagedBeginning);
    last = span.first + (int)(min(end, place.end) - place.begin) - kPagedBeginning;
    find_bounds();
    start_tiles();
    return true;
  }

  // Pages of tokens are looked up when the lengths are known: they are on their way before.
  __device__ void fetch_table() const {
    const long long line = blockIdx.x + (long long)gridDim.x * threadIdx.x;
    if (line >= call.table_lines) return;
    const char* from = (const char*)call.page_table + line * kPagedLine;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
  }

  __device__ void run() {
    fetch_table();
    wait_for_inputs();
    let_next_start();
    // Read before it is needed, so that it comes with the lengths.
    const int word = call.plan != nullptr ? call.plan[kPagedCounters + lane % kPagedHead] : 0;
    const Line line{call, (unsigned)lane};
    long long at;
    Sequence sequence;
    using OneEach = typename Line::template Counted<1>;
    using SomeEach = typename Line::template Counted<kPagedCounted / kLanes>;
    const bool is_there = call.work.batch <= kLanes ? begin(OneEach(line), word, at, sequence)
                          : call.work.batch <= kPagedCounted
                              ? begin(SomeEach(line), word, at, sequence)
                              : begin(typename Line::Planned{line}, word, at, sequence);
    if (!is_there) return;
    if constexpr (kOverlaps) {
      run_overlapped(line, at, sequence);
    } else {
      while (find_part(at, sequence)) {
        for (int i = 0; i < call.stages - 1; ++i) send_first_tile(i);
        const PagedPart& done = compute_part(sequence);
        finish(done, place);
        if (end - place.end <= kPagedBeginning) return;  // as find_part() would say
        __syncthreads();
        at = place.end;
        line.go_on(sequence, at);
      }
    }
  }

  // From unit `at` on, of `sequence`: a part's first tiles are sent beside the sums of the one
  // before.
  __device__ void run_overlapped(const Line& line, long long at, Sequence sequence) {
    const int ahead = call.stages - 1, beside_sums = min(ahead, call.stages - kSumStages);
    const PagedPart* done = nullptr;
    Place done_at{};
    for (;;) {
      // As find_part() would say, without looking for the part.
      const bool is_over =
          (done != nullptr && end - at <= kPagedBeginning) || !find_part(at, sequence);
#pragma unroll 1
      for (int stage = 0;; ++stage) {
        if (stage == beside_sums) {
          if (done != nullptr) finish(*done, done_at);
          if (is_over) return;
          if (done != nullptr) __syncthreads();
        }
        if (stage == ahead) break;
        if (!is_over) send_first_tile(stage);
      }
      done = &compute_part(sequence);
      done_at = place;
      at = min(end, place.end);
      if (end - at > kPagedBeginning) line.go_on(sequence, at);
    }
  }

  // Puts the sums of the part whose first tiles are on their way, and gives it back: before the
  // next one is computed all threads must be done with it.
  __device__ const PagedPart& compute_part(Sequence& sequence) {
    __shared__ Kept kept;
    if (warp == 0) kept = {part, place, all, end, blocks, sequence};
    load_queries();
    start_rows();
    __syncthreads();
    attend();
    put_sums();
    place = {same(kept.place.begin), same(kept.place.end), same(kept.place.is_begun_here)};
    all = same(kept.all);
    end = same(kept.end);
    blocks = same(kept.blocks);
    sequence = {same(kept.sequence.index), same(kept.sequence.before), same(kept.sequence.up_to),
                same(kept.sequence.length)};
    return kept.part;
  }

  // So that the compiler knows that all lanes have the same: behind branches of other numbers it
  // would bring the lanes together in each turn of the loop over keys.
  template <class T>
  static __device__ T same(T value) {
    return (T)__shfl_sync(~0u, value, 0);
  }
};

// Aligned as PagedTiles needs it.
struct alignas(128) PagedMemory {
  unsigned char bytes[128];
};

// kBlocks at once on each multiprocessor: blocks_per_processor() of paged_decode_cuda.cpp.
#define PAGED_DECODE(name, Query, Cache, size, rows, kBlocks)                               \
  extern "C" __global__ void __launch_bounds__(kLanes* kPagedWarps, kBlocks)                \
      paged_decode_##name##_##size##_##rows(const __grid_constant__ PagedDecodeCall call) { \
    extern __shared__ PagedMemory shared[];                                                 \
    Decode<Query, Cache, size, rows>(call, shared->bytes).run();                            \
  }                                                                                         \
  PAGED_EVEN(name, Query, Cache, size, rows, 4, kBlocks)                                    \
  PAGED_EVEN(name, Query, Cache, size, rows, 8, 1)
#define PAGED_EVEN(name, Query, Cache, size, rows, warps, kBlocks)         \
  extern "C" __global__ void __launch_bounds__(kLanes* warps, kBlocks)     \
      paged_decode_even_##name##_##size##_##rows##_##warps(                \
          const __grid_constant__ PagedDecodeCall call) {                  \
    extern __shared__ PagedMemory shared[];                                \
    PagedEven<Query, Cache, size, rows, warps>(call, shared->bytes).run(); \
  }
#define PAGED_DECODES(name, Query, Cache)                                      \
  PAGED_DECODE(name, Query, Cache, 64, 8, 4)                                   \
  PAGED_DECODE(name, Query, Cache, 64, 16, 3)                                  \
  PAGED_DECODE(name, Query, Cache, 64, 32, 3)                                  \
  PAGED_DECODE(name, Query, Cache, 128, 8, (sizeof(Cache::Bits) == 1 ? 4 : 3)) \
  PAGED_DECODE(name, Query, Cache, 128, 16, 3)                                 \
  PAGED_DECODE(name, Query, Cache, 128, 32, 2)

#define PAGED_DECODES_OF(name, Query, Cache) PAGED_DECODES(name, Query, Cache)
PAGED_DECODES_OF(KERNEL_NAME, KERNEL_QUERY, KERNEL_CACHE)
