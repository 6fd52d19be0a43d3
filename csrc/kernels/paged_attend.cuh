// Attention of some rows, queries of a sequence and their heads, to a part of its keys: what a
// block of paged_decode.cu does between finding its part and adding up what its warps have found.
#pragma once

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
struct PagedAttend {
  static constexpr bool kIsFp8 = kIsSame<Cache, E4M3>;
  using Factor = typename Select<kIsFp8, Half, Query>::Type;  // of the products
  static constexpr int kRows = 16 * kTiles;
  static constexpr int kRowBytes = kSize * (int)sizeof(typename Cache::Bits);
  static constexpr int kChunks = kRowBytes / 16;  // of a key
  static constexpr int kTileBytes = kPagedKeys * kRowBytes;
  static constexpr int kSteps = kSize / 16;       // of the product of queries and keys
  static constexpr int kColumnTiles = kSize / 8;  // of the output

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

  __device__ PagedAttend(const PagedDecodeCall& call, unsigned char* shared)
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
};
