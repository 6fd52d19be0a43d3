// Attention of few queries over the pages of a cache, limited by how fast that is read. Compiled
// when the package is built (cmake/compile_kernels.py) for each type of query and cache;
// paged_decode_cuda.cpp launches it.
//
// All units of all sequences and heads of keys are one line, of which each block has an equal part:
// of one sequence or several, and of long ones several blocks have a part each. Within a block each
// warp reads tiles of its own, which are on their way while others are computed, so that no warp
// waits for another before the end of a sequence. Flash-decoding (Dao et al., 2023) with the even
// division of Stream-K (Osama et al., 2023). Sums are in the same order whichever block ends last.

#include "fp8.cuh"
#include "mma.cuh"
#include "paged_work.cuh"

constexpr int kLanes = 32, kThreads = kPagedWarps * kLanes;
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

template <bool kIsFirst, class A, class B>
struct Select {
  using Type = A;
};
template <class A, class B>
struct Select<false, A, B> {
  using Type = B;
};
template <class A, class B>
constexpr bool kIsSame = false;
template <class A>
constexpr bool kIsSame<A, A> = true;

__device__ float minus_infinity() {
  return __uint_as_float(0xff800000);
}

// Cache: of E4M3, else the query's type. kTiles: of 16 rows, the queries of a sequence times the
// heads of a group.
template <class Query, class Cache, int kSize, int kTiles>
struct Decode {
  static constexpr bool kIsFp8 = kIsSame<Cache, E4M3>;
  using Factor = typename Select<kIsFp8, Half, Query>::Type;  // of the products
  static constexpr int kRows = 16 * kTiles;
  static constexpr int kRowBytes = kSize * (int)sizeof(typename Cache::Bits);
  static constexpr int kChunks = kRowBytes / 16;  // of a key
  static constexpr int kTileBytes = kPagedKeys * kRowBytes;
  static constexpr int kSteps = kSize / 16;       // of the product of queries and keys
  static constexpr int kColumnTiles = kSize / 8;  // of the output
  static constexpr int kPartialNumbers = kRows * (kSize + 2);

  const PagedDecodeCall& call;
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const int lane_row = lane / 4, lane_column = lane % 4;
  // Shared memory: the queries in the order in which products read them, numbers of each row, and
  // the tiles of each warp, where at the end of a part of a sequence its sums are.
  uint4* const queries;
  float* const row_scales;  // [kRows]
  float* const row_maxima;  // [kPagedWarps][kRows]
  float* const row_sums;    // [kPagedWarps][kRows]
  unsigned char* const tiles;

  // The part of a sequence that this block is at.
  int index, head_kv, row_start, rows;
  int first, last;             // units
  int key_begin, key_end;      // that any of the rows sees
  int page;                    // that lane % 16 of the next tile to be sent is in
  int shown_begin, shown_end;  // that all of them see
  PagedSequence sequence;
  int row_begin[kTiles][2], row_end[kTiles][2];
  float row_scale[kTiles][2];
  float highest[kTiles][2], sum[kTiles][2];
  float out[kTiles][kColumnTiles][4];

  __device__ Decode(const PagedDecodeCall& call, unsigned char* shared)
      : call(call),
        queries((uint4*)shared),
        row_scales((float*)(shared + kTiles * kSteps * kLanes * 16)),
        row_maxima(row_scales + kRows),
        row_sums(row_maxima + kPagedWarps * kRows),
        tiles((unsigned char*)(row_sums + kPagedWarps * kRows)),
        sequence(call.work, 0) {
  }

  __device__ const typename Query::Bits* query_row(int row) const {
    const int in_sequence = (row_start + row) / call.work.group;
    const int head = head_kv * call.work.group + (row_start + row) % call.work.group;
    return (const typename Query::Bits*)call.query +
           (call.work.cu_seqlens_q == nullptr ? index * call.query_batch : 0) +
           (sequence.first_query + in_sequence) * call.query_token + head * call.query_head;
  }

  // A power of 2 that makes a row's numbers ones of float16, exact but for those 2^-28 times the
  // largest or less; NaN and infinity stay.
  __device__ void find_row_scales() {
    for (int row = warp; row < kRows; row += kPagedWarps) {
      float most = 0;
      if (row < rows) {
        const auto* from = query_row(row);
        for (int i = lane; i < kSize; i += kLanes) most = fmaxf(most, fabsf(Query::read(from[i])));
      }
      for (int step = kLanes / 2; step > 0; step /= 2) {
        most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
      }
      // The largest becomes one of 2^13 to 2^14.
      const int exponent = max((int)(__float_as_uint(most) >> 23) - 127, -113);
      const bool is_number = most > 0 && exponent < 128;
      if (lane == 0) {
        row_scales[row] = is_number ? __uint_as_float((unsigned)(exponent + 127 - 13) << 23) : 1;
      }
    }
    __syncthreads();
  }

  // As fragments of A: of each step, lane l has the columns 8 * (l % 4) + 4 * (step % 2) + {0 to 3}
  // of 32, in the place of 2 * (l % 4) + {0, 1, 8, 9} of 16: the keys lie so that one load has
  // those of two steps.
  __device__ void load_queries() {
    if constexpr (kIsFp8) find_row_scales();
    for (int i = threadIdx.x; i < kTiles * kSteps * kLanes; i += kThreads) {
      const int of_lane = i % kLanes, step = i / kLanes % kSteps, tile = i / kLanes / kSteps;
      const int column = 32 * (step / 2) + 8 * (of_lane % 4) + 4 * (step % 2);
      unsigned words[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * tile + of_lane / 4 + 8 * half;
        typename Query::Bits bits[4] = {};
        if (row < rows) {
          const auto* from = query_row(row) + column;
#pragma unroll
          for (int k = 0; k < 4; ++k) bits[k] = from[k];
        }
        if constexpr (kIsFp8) {
          const float factor = 1 / row_scales[row];
          words[half] = Half::write(Query::read(bits[0]) * factor, Query::read(bits[1]) * factor);
          words[half + 2] =
              Half::write(Query::read(bits[2]) * factor, Query::read(bits[3]) * factor);
        } else {
          words[half] = bits[0] | (unsigned)bits[1] << 16;
          words[half + 2] = bits[2] | (unsigned)bits[3] << 16;
        }
      }
      queries[i] = {words[0], words[1], words[2], words[3]};
    }
  }

  // Chunks lie so that the lanes that read at the same time find theirs in different banks.
  static __device__ int key_chunk(int key, int chunk) {
    if constexpr (!kIsFp8) return chunk ^ (key & 1) << 2;
    return chunk ^ (kRowBytes == 128 ? key & 3 : key >> 1 & 1) << 1;
  }
  static __device__ int value_chunk(int key, int chunk) {
    return chunk ^ (kRowBytes == 64 ? key >> 1 & 3 : key & 7);
  }

  __device__ unsigned char* tile_of(int stage) const {
    return tiles + (warp * call.stages + stage) * 2 * kTileBytes;
  }
  __device__ int first_key(int unit) const {
    return unit * kPagedUnit + warp * kPagedKeys;
  }
  // The page of token lane % 16 of a tile; 0 where none of it is read.
  __device__ int page_of(int unit) const {
    const int key = first_key(unit) + lane % kPagedKeys;
    if (unit >= last || key < key_begin || key >= key_end) return 0;
    return call.page_table[index * call.table_row + (key >> call.page_shift)];
  }

  __device__ void send_tile(int unit, int page_of_lane, int stage) const {
    unsigned char *keys = tile_of(stage), *values = keys + kTileBytes;
    const int start = first_key(unit);
#pragma unroll
    for (int i = 0; i < kPagedKeys * kChunks / kLanes; ++i) {
      const int key = (i * kLanes + lane) / kChunks, chunk = (i * kLanes + lane) % kChunks;
      const long long page = __shfl_sync(~0u, page_of_lane, key);
      const int slot = (start + key) & ((1 << call.page_shift) - 1);
      const bool is_there = start + key >= key_begin && start + key < key_end;
      const auto* from = (const typename Cache::Bits*)call.key_cache + page * call.key_page +
                         slot * call.key_slot + head_kv * call.key_head;
      copy_async(keys + key * kRowBytes + key_chunk(key, chunk) * 16,
                 (const unsigned char*)from + chunk * 16, is_there);
      from = (const typename Cache::Bits*)call.value_cache + page * call.value_page +
             slot * call.value_slot + head_kv * call.value_head;
      copy_async(values + key * kRowBytes + value_chunk(key, chunk) * 16,
                 (const unsigned char*)from + chunk * 16, is_there);
    }
  }

  // Of two steps, keys lane / 4 and lane / 4 + 8: what lane % 4 has of a product's terms.
  __device__ void load_keys(const unsigned char* keys, int pair, unsigned (&to)[2][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = lane_row + 8 * half;
      if constexpr (kIsFp8) {
        const int chunk = key_chunk(key, 2 * pair + lane_column / 2);
        const uint2 eight =
            *(const uint2*)(keys + key * kRowBytes + chunk * 16 + lane_column % 2 * 8);
        to[half][0] = e4m3_to_half((unsigned short)eight.x);
        to[half][1] = e4m3_to_half((unsigned short)(eight.x >> 16));
        to[half][2] = e4m3_to_half((unsigned short)eight.y);
        to[half][3] = e4m3_to_half((unsigned short)(eight.y >> 16));
      } else {
        const int chunk = key_chunk(key, 4 * pair + lane_column);
        const uint4 eight = *(const uint4*)(keys + key * kRowBytes + chunk * 16);
        to[half][0] = eight.x;
        to[half][1] = eight.y;
        to[half][2] = eight.z;
        to[half][3] = eight.w;
      }
    }
  }

  // scores[tile][half]: keys 8 * half + 2 * (lane % 4) + {0, 1}, rows lane / 4 and lane / 4 + 8.
  __device__ void find_scores(const unsigned char* keys, float (&scores)[kTiles][2][4]) const {
#pragma unroll
    for (int pair = 0; pair < kSteps / 2; ++pair) {
      unsigned of_keys[2][4];
      load_keys(keys, pair, of_keys);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const uint4 four = queries[(tile * kSteps + 2 * pair + step) * kLanes + lane];
          const unsigned of_queries[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            multiply_add<Factor>(scores[tile][half], of_queries, of_keys[half][2 * step],
                                 of_keys[half][2 * step + 1]);
          }
        }
      }
    }
  }

  // From scores to what values are weighed with, by powers of 2; the sums so far shrink to the
  // highest score.
  __device__ void weigh(int start, float (&scores)[kTiles][2][4], unsigned (&weights)[kTiles][4]) {
    const bool is_partly_hidden = start < shown_begin || start + kPagedKeys > shown_end;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float most = minus_infinity();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& score = scores[tile][i / 2][2 * row + i % 2];
          score *= row_scale[tile][row];
          if (call.softcap > 0) score = call.softcap * tanhf(score / call.softcap);
          score *= kLog2E;
          const int key = start + 8 * (i / 2) + 2 * lane_column + i % 2;
          if (is_partly_hidden && (key < row_begin[tile][row] || key >= row_end[tile][row])) {
            score = minus_infinity();
          }
          most = fmaxf(most, score);
        }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        const float higher = fmaxf(highest[tile][row], most);
        const float base = higher == minus_infinity() ? 0 : higher;
        const float shrink = power_of_2(highest[tile][row] - base);
        highest[tile][row] = higher;
        float mine = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& score = scores[tile][i / 2][2 * row + i % 2];
          score = power_of_2(score - base);
          mine += score;
        }
        sum[tile][row] = sum[tile][row] * shrink + mine;
        weights[tile][row] = Factor::write(scores[tile][0][2 * row], scores[tile][0][2 * row + 1]);
        weights[tile][row + 2] =
            Factor::write(scores[tile][1][2 * row], scores[tile][1][2 * row + 1]);
#pragma unroll
        for (int column = 0; column < kColumnTiles; ++column) {
          out[tile][column][2 * row] *= shrink;
          out[tile][column][2 * row + 1] *= shrink;
        }
      }
    }
  }

  // What comes transposed are pairs of bytes: of two columns of E4M3, each of which has products of
  // its own.
  __device__ void add_values(const unsigned char* values, const unsigned (&weights)[kTiles][4]) {
    const int key = lane % 8 + lane / 8 % 2 * 8;
#pragma unroll
    for (int pair = 0; pair < kChunks / 2; ++pair) {
      unsigned four[4];
      load_transposed(four, values + key * kRowBytes + value_chunk(key, 2 * pair + lane / 16) * 16);
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk) {
        const unsigned low = four[2 * chunk], high = four[2 * chunk + 1];
        const int at = 2 * pair + chunk;
        if constexpr (kIsFp8) {
          const unsigned lows = __byte_perm(low, 0, 0x3120), highs = __byte_perm(high, 0, 0x3120);
          const unsigned even[2] = {e4m3_to_half((unsigned short)lows),
                                    e4m3_to_half((unsigned short)highs)};
          const unsigned odd[2] = {e4m3_to_half((unsigned short)(lows >> 16)),
                                   e4m3_to_half((unsigned short)(highs >> 16))};
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            multiply_add<Factor>(out[tile][2 * at], weights[tile], even[0], even[1]);
            multiply_add<Factor>(out[tile][2 * at + 1], weights[tile], odd[0], odd[1]);
          }
        } else {
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            multiply_add<Factor>(out[tile][at], weights[tile], low, high);
          }
        }
      }
    }
  }

  // Where number i of `out`'s column tile belongs.
  __device__ int column_of(int tile, int i) const {
    if constexpr (kIsFp8) return 16 * (tile / 2) + 4 * lane_column + 2 * (i % 2) + tile % 2;
    return 8 * tile + 2 * lane_column + i % 2;
  }

  // What this block sees of the part's keys.
  __device__ void find_bounds() {
    const int first_query = row_start / call.work.group;
    const int last_query = (row_start + rows - 1) / call.work.group;
    key_begin = sequence.begin(call.work, first_query);
    key_end = sequence.end(call.work, last_query);
    shown_begin = sequence.begin(call.work, last_query);
    shown_end = sequence.end(call.work, first_query);
    first = max(first, key_begin / kPagedUnit);
    last = min(last, (key_end + kPagedUnit - 1) / kPagedUnit);
  }

  // Puts this warp's first tiles on their way.
  __device__ void send_first_tiles() {
    page = page_of(first);
    for (int i = 0; i < call.stages - 1; ++i) {
      const int next = page_of(first + i + 1);
      if (first + i < last) send_tile(first + i, page, i);
      end_copies();
      page = next;
    }
  }

  __device__ void start_rows() {
    const int row_last = row_start + rows - 1;
    float scale = call.scale;
    if (call.descale_k != nullptr) scale *= call.descale_k[head_kv * call.descale_k_step];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * tile + lane_row + 8 * half;
        const int query = min(row_start + row, row_last) / call.work.group;
        row_begin[tile][half] = sequence.begin(call.work, query);
        row_end[tile][half] = sequence.end(call.work, query);
        row_scale[tile][half] = kIsFp8 ? scale * row_scales[row] : scale;
        highest[tile][half] = minus_infinity();
        sum[tile][half] = 0;
#pragma unroll
        for (int column = 0; column < kColumnTiles; ++column) {
          out[tile][column][2 * half] = out[tile][column][2 * half + 1] = 0;
        }
      }
    }
  }

  // This warp's tiles of units first to last.
  __device__ void attend() {
    const int ahead = call.stages - 1;
    int stage = 0, free = ahead;
    for (int unit = first; unit < last; ++unit) {
      const int next = page_of(unit + ahead + 1);
      if (ahead == 1) {
        wait_for_copies<0>();
      } else if (ahead == 2) {
        wait_for_copies<1>();
      } else {
        wait_for_copies<2>();
      }
      __syncwarp();
      if (unit + ahead < last) send_tile(unit + ahead, page, free);
      end_copies();
      page = next;
      const unsigned char* keys = tile_of(stage);
      float scores[kTiles][2][4] = {};
      find_scores(keys, scores);
      unsigned weights[kTiles][4];
      weigh(first_key(unit), scores, weights);
      add_values(keys + kTileBytes, weights);
      stage = stage + 1 == call.stages ? 0 : stage + 1;
      free = free + 1 == call.stages ? 0 : free + 1;
    }
    wait_for_copies<0>();
  }

  // Each warp's sums, as [kRows][kSize], in the place of its tiles.
  __device__ void put_sums() {
    float* mine = (float*)tile_of(0);
    __syncwarp();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * tile + lane_row + 8 * half;
        float all = sum[tile][half];
        all += __shfl_xor_sync(~0u, all, 1);
        all += __shfl_xor_sync(~0u, all, 2);
        if (lane_column == 0) {
          row_maxima[warp * kRows + row] = highest[tile][half];
          row_sums[warp * kRows + row] = all;
        }
#pragma unroll
        for (int column = 0; column < kColumnTiles; ++column) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            mine[row * kSize + column_of(column, i)] = out[tile][column][2 * half + i];
          }
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
      const float* of_warp = (const float*)(tiles + i * call.stages * 2 * kTileBytes);
      sums.add(row_maxima[i * kRows + row], row_sums[i * kRows + row],
               *(const float4*)(of_warp + row * kSize + column));
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
      is_same = is_same && call.plan[kPagedCounters + i] == paged_head(call.work, i);
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

  __device__ void run() {
    if (!has_its_plan()) return;
    const int* sums = call.plan + kPagedSums;
    const long long heads = call.heads_kv, all = sums[call.work.batch] * heads;
    const long long blocks = min((long long)gridDim.x, all), block = blockIdx.x;
    if (block >= blocks) return;
    const long long begin = block * all / blocks, end = (block + 1) * all / blocks;
    for (long long at = begin; at < end;) {
      const int before = (int)(at / heads);
      int low = 0, high = call.work.batch;  // sums[low] <= before < sums[high]
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (sums[middle] <= before) {
          low = middle;
        } else {
          high = middle;
        }
      }
      index = low;
      sequence = PagedSequence(call.work, index);
      const PagedSpan span(call.work, sequence);
      const long long in_sequence = at - sums[index] * heads;
      const int unit = (int)(in_sequence % span.units);
      const int part = (int)(in_sequence / span.units);
      head_kv = part / span.row_blocks;
      row_start = part % span.row_blocks * kRows;
      rows = min(sequence.queries * call.work.group - row_start, kRows);
      const long long part_begin = at - unit, part_end = part_begin + span.units;
      const long long stop = min(end, part_end);
      first = span.first + unit;
      last = first + (int)(stop - at);
      find_bounds();
      send_first_tiles();
      load_queries();
      start_rows();
      __syncthreads();
      attend();
      put_sums();
      if (part_begin >= begin && part_end <= end) {
        for (int i = threadIdx.x; i < rows * (kSize / 4); i += kThreads) {
          const int row = i / (kSize / 4), column = i % (kSize / 4) * 4;
          write(row, column, sums_of_warps(row, column));
        }
      } else {
        // The block of a unit is the last one that begins at it or before.
        const int first_block = (int)(((part_begin + 1) * blocks - 1) / all);
        const int last_block = (int)((part_end * blocks - 1) / all);
        put_partial(2 * block + (part_begin >= begin));
        if (is_last(first_block, last_block)) write_all(first_block, last_block);
      }
      __syncthreads();
      at = stop;
    }
  }
};

// kBlocks at once on each multiprocessor.
#define PAGED_DECODE(name, Query, Cache, size, tiles, kBlocks)                               \
  extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)                            \
      paged_decode_##name##_##size##_##tiles(const __grid_constant__ PagedDecodeCall call) { \
    extern __shared__ uint4 shared[];                                                        \
    Decode<Query, Cache, size, tiles>(call, (unsigned char*)shared).run();                   \
  }
#define PAGED_DECODES(name, Query, Cache)     \
  PAGED_DECODE(name, Query, Cache, 64, 1, 3)  \
  PAGED_DECODE(name, Query, Cache, 64, 2, 3)  \
  PAGED_DECODE(name, Query, Cache, 128, 1, 3) \
  PAGED_DECODE(name, Query, Cache, 128, 2, 2)

#define PAGED_DECODES_OF(name, Query, Cache) PAGED_DECODES(name, Query, Cache)
PAGED_DECODES_OF(KERNEL_NAME, KERNEL_QUERY, KERNEL_CACHE)
