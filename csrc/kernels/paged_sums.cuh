// What the warps of a block have found, added up, and the result that it becomes.
#pragma once

#include "paged_attend.cuh"

template <class Query, class Cache, int kSize, int kRows, int kWarps>
struct PagedSums : PagedAttend<Query, Cache, kSize, kRows, kWarps> {
  using Base = PagedAttend<Query, Cache, kSize, kRows, kWarps>;
  using Base::Base;
  using Base::base;
  using Base::call;
  using Base::column_of;
  using Base::kGroups;
  using Base::kSteps;
  using Base::lane;
  using Base::memory;
  using Base::out;
  using Base::row_maxima;
  using Base::row_sums;
  using Base::sum;
  using Base::warp;
  using Base::without_base;
  static constexpr int kStageBytes = Base::Tiles::kStageBytes;
  // Of a warp's sums, in the place of its last stages.
  static constexpr int kSumBytes = kRows * kSize * (int)sizeof(float);

  // Where a warp's sums of a row are, [kRows][kSize]: so that the rows of four lanes, each of which
  // has two, are in different banks.
  __device__ float* sum_at(int of_warp, int row, int column) const {
    unsigned char* behind = memory + (of_warp + 1) * call.stages * kStageBytes;
    return (float*)(behind - kSumBytes) + row * kSize + (column ^ row / 2 % 4 * 8);
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
    for (int i = 0; i < kWarps; ++i) {
      sums.add(row_maxima[i * kRows + row], row_sums[i * kRows + row],
               *(const float4*)sum_at(i, row, column));
    }
    return sums;
  }

  __device__ void write(const PagedPart& of, int row, int column, Sums sums) const {
    const int query = of.query_of(call.work, row), head = of.head_of(call.work, row);
    if (call.sinks != nullptr) sums.add(call.sinks[head] * kLog2E, 1, {0, 0, 0, 0});
    float share = sums.sum == 0 ? 0 : 1 / sums.sum;
    if (call.descale_v != nullptr) share *= call.descale_v[of.head_kv * call.descale_v_step];
    const float scaled[4] = {sums.values[0] * share, sums.values[1] * share, sums.values[2] * share,
                             sums.values[3] * share};
    const long long token = call.work.cu_seqlens_q == nullptr
                                ? (long long)of.index * call.work.queries + query
                                : of.sequence.first_query + query;
    auto* to = (typename Query::Bits*)call.out + token * call.out_token + head * kSize + column;
    *(Piece<Query, 4>*)to = Piece<Query, 4>::of(scaled);
    if (call.lse != nullptr && column == 0) {
      const long long in_lse = call.work.cu_seqlens_q == nullptr
                                   ? of.index * call.lse_batch + query * call.lse_token
                                   : token * call.lse_token;
      call.lse[in_lse + head * call.lse_head] =
          sums.sum == 0 ? minus_infinity() : (sums.highest + log2f(sums.sum)) * kLn2;
    }
  }
};
