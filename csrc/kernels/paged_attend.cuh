// Attention of some rows, queries of a sequence and their heads, to a part of its keys: what a
// block of paged_decode.cu does between finding its part and adding up what its warps have found.
#pragma once

#include "fp8.cuh"
#include "paged_tiles.cuh"

constexpr int kLanes = 32;
// How far, as powers of 2, scores may be above the one that they are relative to: sums need not
// shrink for each that is higher than all before. Weights of float16 could be 2^15.
constexpr float kMostRise = 8;
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

// Rows are the queries of a sequence times the heads of a group, kRows at most. Products have 16
// rows and 8 columns: keys, or the columns of values, are their rows, and the rows of here their
// columns, as there are few of them. Cache: of E4M3, else the query's type.
template <class Query, class Cache, int kSize, int kRows, int kWarps>
struct PagedAttend {
  using Tiles = PagedTiles<Cache, kSize>;
  static constexpr int kThreads = kWarps * kLanes;
  static constexpr bool kIsFp8 = kIsSame<Cache, E4M3>;
  using Factor = typename Select<kIsFp8, Half, Query>::Type;  // of the products
  static constexpr int kGroups = kRows / 8;
  static constexpr int kSteps = kSize / 16;  // of the product of keys and queries, and of columns
  // Of one group products would wait for each other, if all were added to the same sums.
  static constexpr int kChains = kGroups == 1 ? 2 : 1;

  const PagedDecodeCall& call;
  // From lane 0, so that the compiler knows that all lanes have the same.
  const int warp = __shfl_sync(~0u, threadIdx.x / kLanes, 0);
  // Shared memory: the tiles of each warp, where at the end of a part of a sequence its sums are,
  // the queries in the order in which products read them, and words of each row.
  unsigned char* const memory;
  uint4* const queries;
  float* const row_scales;  // [kRows]
  float* const row_maxima;  // [kWarps][kRows]
  float* const row_sums;    // [kWarps][kRows]
  int* const row_begin;     // [kRows]
  int* const row_end;       // [kRows]
  Tiles tiles;
  const int lane = tiles.lane, lane_row = lane / 4, lane_column = lane % 4;

  PagedPart part;              // that this block is at
  int first, last;             // units
  int key_begin, key_end;      // that any of the rows sees
  int shown_begin, shown_end;  // that all of them see
  int tile_begin, tile_end;    // keys of this warp's tiles, from the first one's first on
  int page;                    // of the next tile to be sent
  // Of rows 8 * group + 2 * (lane % 4) + i: what products become scores by, what these are relative
  // to, and the sum of this lane's weights.
  float row_scale[kGroups][2], base[kGroups][2], sum[kGroups][2];
  unsigned without_base;          // a bit 2 * group + i for each row that had no score yet
  float out[kGroups][kSteps][4];  // numbers i and i + 2 are of row i

  __device__ PagedAttend(const PagedDecodeCall& call, unsigned char* shared)
      : call(call),
        memory(shared),
        queries((uint4*)(shared + kWarps * call.stages * Tiles::kStageBytes)),
        row_scales((float*)(queries + kRows * kSize / 8)),
        row_maxima(row_scales + kRows),
        row_sums(row_maxima + kWarps * kRows),
        row_begin((int*)(row_sums + kWarps * kRows)),
        row_end(row_begin + kRows),
        tiles(call, shared, warp) {
  }

  __device__ const typename Query::Bits* query_row(int row) const {
    return (const typename Query::Bits*)call.query +
           (call.work.cu_seqlens_q == nullptr ? part.index * call.query_batch : 0) +
           (part.sequence.first_query + part.query_of(call.work, row)) * call.query_token +
           part.head_of(call.work, row) * call.query_head;
  }

  // A power of 2 that makes a row's numbers ones of float16, exact but for those 2^-28 times the
  // largest or less; NaN and infinity stay.
  __device__ void find_row_scales() {
    constexpr int kEach = (kRows + kWarps - 1) / kWarps;
    float most[kEach] = {};
#pragma unroll
    for (int k = 0; k < kEach; ++k) {  // all numbers are on their way at once
      const auto* from = query_row(min(warp + k * kWarps, part.rows - 1));
#pragma unroll
      for (int i = 0; i < kSize; i += kLanes) {
        most[k] = fmaxf(most[k], fabsf(Query::read(from[lane + i])));
      }
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      for (int step = kLanes / 2; step > 0; step /= 2) {
        most[k] = fmaxf(most[k], __shfl_xor_sync(~0u, most[k], step));
      }
      // The largest becomes one of 2^13 to 2^14.
      const int exponent = max((int)(__float_as_uint(most[k]) >> 23) - 127, -113);
      const bool is_number = most[k] > 0 && exponent < 128;
      const int row = warp + k * kWarps;
      if (lane == 0 && row < kRows) {
        row_scales[row] = is_number ? __uint_as_float((unsigned)(exponent + 127 - 13) << 23) : 1;
      }
    }
    __syncthreads();
  }

  // As fragments of B, of each lane those of two steps. Of E4M3 a lane has four columns of a step
  // that lie one after the other, as it has those of keys.
  __device__ void load_queries() {
    if constexpr (kIsFp8) find_row_scales();
    constexpr int kItems = kGroups * kSteps / 2 * kLanes;
    constexpr int kEach = (kItems + kThreads - 1) / kThreads;
    typename Query::Bits numbers[kEach][8];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int i = threadIdx.x + k * kThreads, of_lane = i % kLanes;
      const int pair = i / kLanes % (kSteps / 2), row = i / kLanes / (kSteps / 2) * 8 + of_lane / 4;
      const auto* from = query_row(min(row, part.rows - 1));
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const int in_step =
            kIsFp8 ? 4 * (of_lane % 4) + word % 2 * 2 : 2 * (of_lane % 4) + word % 2 * 8;
        const auto* two = from + (2 * pair + word / 2) * 16 + in_step;
        numbers[k][2 * word] = two[0];
        numbers[k][2 * word + 1] = two[1];
      }
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int i = threadIdx.x + k * kThreads;
      const int row = i / kLanes / (kSteps / 2) * 8 + i % kLanes / 4;
      if (i >= kItems) continue;
      unsigned words[4];
      const float factor = kIsFp8 ? 1 / row_scales[row] : 1;
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const auto low = numbers[k][2 * word], high = numbers[k][2 * word + 1];
        if constexpr (kIsFp8) {
          words[word] = Half::write(Query::read(low) * factor, Query::read(high) * factor);
        } else {
          words[word] = low | (unsigned)high << 16;
        }
        if (row >= part.rows) words[word] = 0;
      }
      queries[i] = {words[0], words[1], words[2], words[3]};
    }
  }

  // Fragments of A, of two steps.
  __device__ void load_keys(unsigned rows_at, int pair, unsigned (&to)[2][4]) const {
    if constexpr (kIsFp8) {
      unsigned four[4];
      load_rows(four, Tiles::pair_at(rows_at, pair));
#pragma unroll
      for (int i = 0; i < 4; ++i) e4m3_to_halves(four[i], to[i / 2][i % 2], to[i / 2][i % 2 + 2]);
    } else {
      load_rows(to[0], Tiles::pair_at(rows_at, 2 * pair));
      load_rows(to[1], Tiles::pair_at(rows_at, 2 * pair + 1));
    }
  }

  // scores[group]: of keys lane / 4 and lane / 4 + 8, of each the rows 2 * (lane % 4) + {0, 1}.
  __device__ void find_scores(unsigned keys, float (&scores)[kGroups][4]) const {
    float chains[kChains][kGroups][4] = {};
#pragma unroll
    for (int pair = 0; pair < kSteps / 2; ++pair) {
      unsigned of_keys[2][4];
      load_keys(keys, pair, of_keys);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const uint4 four = queries[(group * (kSteps / 2) + pair) * kLanes + lane];
        multiply_add<Factor>(chains[0][group], of_keys[0], four.x, four.y);
        multiply_add<Factor>(chains[kChains - 1][group], of_keys[1], four.z, four.w);
      }
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[group][i] = chains[0][group][i];
        if (kChains == 2) scores[group][i] += chains[kChains - 1][group][i];
      }
    }
  }

  // Scores of keys that their rows do not see weigh nothing.
  __device__ void hide(int start, float (&scores)[kGroups][4]) const {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = start + lane_row + 8 * (i / 2);
        const int row = 8 * group + 2 * lane_column + i % 2;
        if (key < row_begin[row] || key >= row_end[row]) scores[group][i] = minus_infinity();
      }
    }
  }

  // Makes scores relative to the highest of their rows, where one rose too far above what they were
  // relative to; the sums so far shrink as much.
  __device__ void raise(float (&scores)[kGroups][4]) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float most = fmaxf(scores[group][i], scores[group][i + 2]);
#pragma unroll
        for (int step = 4; step < kLanes; step *= 2) {
          most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        }
        const unsigned bit = 1 << (2 * group + i);
        const bool is_first = without_base & bit;
        const bool rises = most > (is_first ? minus_infinity() : kMostRise);
        const float rise = rises ? most : 0;
        // There is nothing to shrink before the first.
        const float shrink = is_first ? 0 : power_of_2(-rise);
        if (rises) without_base &= ~bit;
        base[group][i] += rise;
        scores[group][i] -= rise;
        scores[group][i + 2] -= rise;
        sum[group][i] *= shrink;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          out[group][step][i] *= shrink;
          out[group][step][i + 2] *= shrink;
        }
      }
    }
  }

  // From scores to what values are weighed with, by powers of 2, as fragments of B.
  __device__ void weigh(int start, float (&scores)[kGroups][4], unsigned (&weights)[kGroups][2]) {
    if (call.softcap > 0) {
#pragma unroll
      for (int i = 0; i < 4 * kGroups; ++i) {
        float& score = scores[i / 4][i % 4];
        const float share = tanhf(score * row_scale[i / 4][i % 2]);
        score = call.softcap * kLog2E * share - base[i / 4][i % 2];
        keep(score);  // not to be made one with what is below
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4 * kGroups; ++i) {
        float& score = scores[i / 4][i % 4];
        score = fmaf(score, row_scale[i / 4][i % 2], -base[i / 4][i % 2]);
      }
    }
    if (start < shown_begin || start + kPagedKeys > shown_end) hide(start, scores);
    bool is_higher = without_base != 0;
#pragma unroll
    for (int i = 0; i < 4 * kGroups; ++i) is_higher |= scores[i / 4][i % 4] > kMostRise;
    if (__any_sync(~0u, is_higher)) raise(scores);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      float of_keys[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) of_keys[i] = power_of_2(scores[group][i]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sum[group][i] += of_keys[i] + of_keys[i + 2];
        weights[group][i] = transpose(Factor::write(of_keys[2 * i], of_keys[2 * i + 1]));
      }
    }
  }

  // What comes transposed are pairs of bytes: of two columns of E4M3.
  __device__ void add_values(unsigned rows_at, const unsigned (&weights)[kGroups][2]) {
#pragma unroll
    for (int pair = 0; pair < Tiles::kPairs; ++pair) {
      unsigned four[4];
      load_transposed(four, Tiles::pair_at(rows_at, pair) + Tiles::kTileBytes);
      if constexpr (kIsFp8) {
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
          unsigned of_columns[4];  // even and odd ones, of keys up to 7 and of the rest
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            e4m3_to_halves(__byte_perm(four[2 * chunk + half], 0, 0x3120), of_columns[2 * half],
                           of_columns[2 * half + 1]);
          }
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            multiply_add<Factor>(out[group][2 * pair + chunk], of_columns, weights[group][0],
                                 weights[group][1]);
          }
        }
      } else {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          multiply_add<Factor>(out[group][pair], four, weights[group][0], weights[group][1]);
        }
      }
    }
  }

  // Where number i of `out`'s step belongs in its row.
  static __device__ int column_of(int step, int i, int lane_row) {
    return 16 * step + (kIsFp8 ? 2 * lane_row + i / 2 : lane_row + i / 2 * 8);
  }

  // What this block sees of the part's keys.
  __device__ void find_bounds() {
    const PagedSequence& sequence = part.sequence;
    key_begin = shown_begin = 0;
    key_end = shown_end = sequence.keys;
    if (!sees_all(call.work)) {
      const int first_query = part.query_of(call.work, 0);
      const int last_query = part.query_of(call.work, part.rows - 1);
      key_begin = sequence.begin(call.work, first_query);
      key_end = sequence.end(call.work, last_query);
      shown_begin = sequence.begin(call.work, last_query);
      shown_end = sequence.end(call.work, first_query);
    }
    first = max(first, key_begin / kPagedUnit);
    last = min(last, (key_end + kPagedUnit - 1) / kPagedUnit);
  }

  // Finds this warp's tiles, without those that have no keys, and the page of the first one.
  __device__ void start_tiles() {
    tiles.start(part.index, part.head_kv, key_begin, key_end);
    tile_begin = first * kPagedUnit + warp * kPagedKeys;
    if (tile_begin + kPagedKeys <= key_begin) tile_begin += kPagedUnit;
    tile_end = min(last * kPagedUnit, key_end);
    page = tiles.page_of(tile_begin);
  }

  // Puts the first tile on its way, or the next ones, each to the stage of its number.
  __device__ void send_first_tile(int number) {
    const int start = tile_begin + number * kPagedUnit, next = tiles.page_of(start + kPagedUnit);
    if (start < tile_end) tiles.send(start, page, tiles.begin + number * Tiles::kStageBytes);
    end_copies();
    page = next;
  }

  __device__ void start_rows() {
    for (int row = threadIdx.x; row < kRows; row += kThreads) {
      const int query = part.query_of(call.work, min(row, part.rows - 1));
      row_begin[row] = part.sequence.begin(call.work, query);
      row_end[row] = part.sequence.end(call.work, query);
    }
    float scale = call.scale;
    if (call.descale_k != nullptr) scale *= call.descale_k[part.head_kv * call.descale_k_step];
    without_base = (1 << 2 * kGroups) - 1;
    scale = call.softcap > 0 ? scale / call.softcap : scale * kLog2E;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        row_scale[group][i] = scale;
        if (kIsFp8) row_scale[group][i] *= row_scales[8 * group + 2 * lane_column + i];
        base[group][i] = sum[group][i] = 0;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          out[group][step][i] = out[group][step][i + 2] = 0;
        }
      }
    }
  }

  // This warp's tiles of units first to last.
  __device__ void attend() {
    const int ahead = call.stages - 1;
    unsigned stage = tiles.begin, free = tiles.begin + ahead * Tiles::kStageBytes;
    for (int start = tile_begin; start < tile_end; start += kPagedUnit) {
      const int to_send = start + ahead * kPagedUnit;
      const int next = tiles.page_of(to_send + kPagedUnit);
      if (ahead == 1) {
        wait_for_copies<0>();
      } else if (ahead == 2) {
        wait_for_copies<1>();
      } else {
        wait_for_copies<2>();
      }
      __syncwarp();
      if (to_send < tile_end) tiles.send(to_send, page, free);
      end_copies();
      page = next;
      float scores[kGroups][4];
      find_scores(stage + tiles.key_row, scores);
      unsigned weights[kGroups][2];
      weigh(start, scores, weights);
      add_values(stage + tiles.value_row, weights);
      free = stage;
      stage = stage + Tiles::kStageBytes == tiles.end ? tiles.begin : stage + Tiles::kStageBytes;
    }
    wait_for_copies<0>();
  }
};
