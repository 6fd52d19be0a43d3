// Attention over all keys but the last few becomes attention over those that each query sees, and
// over the sink. Compiled when the package is built (cmake/compile_kernels.py);
// paged_merge_cuda.cpp launches it.

#include "number.cuh"
#include "paged_merge_call.h"

constexpr int kLanes = 32;
constexpr unsigned kAll = 0xffffffffu;

// The partial results are [batch, heads_kv, queries, group], the result [batch, queries, heads]
// and, of the log-sum-exp, [batch, heads, queries]. A warp has one query of one head, all columns
// at once; or, of heads of any size (kIsWide), so many of them at a time as kPairs say, each time
// with the scores computed again.
template <class Type, int kPairs, bool kIsWide>
__device__ void merge(const PagedMergeCall& m) {
  constexpr int kColumns = 2 * kPairs * kLanes;
  const float infinity = __int_as_float(0x7f800000);
  const int lane = threadIdx.x % kLanes;
  const unsigned warp = blockIdx.x * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  const unsigned in_group = warp % m.group;
  const unsigned query = warp / m.group % m.queries;
  const unsigned head_kv = warp / (m.group * m.queries) % m.heads_kv;
  const unsigned sequence = warp / (m.group * m.queries * m.heads_kv);
  if (sequence >= m.batch) return;
  const unsigned head = head_kv * m.group + in_group, heads = m.heads_kv * m.group;
  // Numbers lie in pairs: this lane has those at 2 lane and 2 lane + 1 of every 64.
  using Pair = Piece<Type, 2>;
  using Pairs = float[kPairs][2];
  const auto pair_at = [](const void* memory, long long i) {
    return (Pair*)((typename Type::Bits*)memory + i);
  };
  const auto load = [&](const void* memory, long long start, int size, Pairs& pairs) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int at = 2 * (i * kLanes + lane);
      pairs[i][0] = pairs[i][1] = 0;
      if (at < size) pair_at(memory, start + at)->read(pairs[i]);
    }
  };

  const int first = m.seq_lens_kv[sequence] - m.hidden;
  const int seen = m.hidden > 0 ? (int)query : 0;  // of the hidden keys
  // Lane l finds out where the l-th key is: there are fewer keys than lanes.
  const int mine = first + lane;
  const bool is_seen = lane < seen && mine >= 0;
  const int page = is_seen ? m.page_table[sequence * m.table_row + mine / m.page_size] : 0;
  const int slot = is_seen ? mine % m.page_size : 0;
  const long long query_at = sequence * m.query_batch + query * m.query_token + head * m.query_head;
  Pairs own;
  if (!kIsWide && seen > 0) load(m.query, query_at, m.size, own);
  const auto score_of = [&](long long key_at) {
    float score = 0;
    for (int column = 0; column < (kIsWide ? m.size : 1); column += kColumns) {
      Pairs keys;
      if (kIsWide) load(m.query, query_at + column, m.size - column, own);
      load(m.key_cache, key_at + column, m.size - column, keys);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        score += own[i][0] * keys[i][0] + own[i][1] * keys[i][1];
      }
    }
    for (int step = kLanes / 2; step > 0; step /= 2) score += __shfl_xor_sync(kAll, score, step);
    score *= m.scale;
    return m.softcap > 0 ? m.softcap * tanhf(score / m.softcap) : score;
  };

  // exp(s - highest) summed up, and the values so weighed.
  const float partial_lse = m.partial_lse[warp];
  const long long to = ((long long)sequence * m.queries + query) * heads + head;
  float highest = 0, sum = 0;
  for (int column = 0; column < (kIsWide ? m.value_size : 1); column += kColumns) {
    const int columns = m.value_size - column;
    highest = partial_lse;
    sum = highest == -infinity ? 0.f : 1.f;
    Pairs sums;
    load(m.partial_out, (long long)warp * m.value_size + column, sum > 0 ? columns : 0, sums);
    const auto add = [&](float score) {  // what to weigh it with
      if (score == -infinity) return 0.f;
      const float higher = fmaxf(highest, score);
      const float shrink = sum > 0 ? expf(highest - higher) : 0.f;
      const float weight = expf(score - higher);
      sum = sum * shrink + weight;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        sums[i][0] *= shrink;
        sums[i][1] *= shrink;
      }
      highest = higher;
      return weight;
    };
    for (int key = max(-first, 0); key < seen; ++key) {
      const long long in_page = __shfl_sync(kAll, page, key),
                      in_slot = __shfl_sync(kAll, slot, key);
      Pairs values;
      load(m.value_cache,
           in_page * m.value_page + in_slot * m.value_slot + head_kv * m.value_head + column,
           columns, values);
      const float weight =
          add(score_of(in_page * m.key_page + in_slot * m.key_slot + head_kv * m.key_head));
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        sums[i][0] += weight * values[i][0];
        sums[i][1] += weight * values[i][1];
      }
    }
    if (m.sinks) add(m.sinks[head]);
    const float share = sum > 0 ? 1 / sum : 0.f;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int at = 2 * (i * kLanes + lane);
      if (at < columns) {
        *pair_at(m.out, to * m.value_size + column + at) =
            Pair::of({sums[i][0] * share, sums[i][1] * share});
      }
    }
  }
  // The partial log-sum-exp, which every lane reads, may lie where this one is written.
  __syncwarp();
  if (m.lse && lane == 0) {
    m.lse[((long long)sequence * heads + head) * m.queries + query] =
        sum > 0 ? highest + logf(sum) : -infinity;
  }
}

// For head sizes up to 128, up to 256, and all.
#define PAGED_MERGE(name, Type, size, is_wide)                      \
  extern "C" __global__ void paged_merge_##name(PagedMergeCall m) { \
    merge<Type, size / 2 / kLanes, is_wide>(m);                     \
  }

PAGED_MERGE(half_128, Half, 128, false)
PAGED_MERGE(half_256, Half, 256, false)
PAGED_MERGE(half_any, Half, 256, true)
PAGED_MERGE(bfloat16_128, BFloat16, 128, false)
PAGED_MERGE(bfloat16_256, BFloat16, 256, false)
PAGED_MERGE(bfloat16_any, BFloat16, 256, true)
