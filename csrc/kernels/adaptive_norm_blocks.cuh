// The gradients of adaptive norms whose samples have many rows: fewer sums go through memory.
//
// A block of several groups, each of the threads that share a row, is one worker
// (adaptive_norm.cuh): its groups take turns at its rows, and add up their sums where a sample ends
// or the worker's rows do. The parts of samples the blocks add up together, once all of them have
// written theirs: they run at the same time. A kernel behind this one takes 1 to 2 us longer; the
// last block of each sample more than that where samples have many parts; and clusters, whose
// blocks have to be near each other, leave multiprocessors idle.
#pragma once

#include "adaptive_norm.cuh"
#include "grid_barrier.cuh"
#include "group_barrier.cuh"
#include "row_pipeline.cuh"

// Floats of a row's columns in shared memory, for the groups of a block: a part of each piece
// beside those of the other pieces.
template <int kWidth>
struct BlockColumns {
  static constexpr int kPart = kWidth < 4 ? kWidth : 4, kParts = kWidth / kPart;
  using Part = Piece<Float, kPart>;

  Part* memory;
  unsigned pieces;

  __device__ unsigned parts() const {
    return kParts * pieces;
  }
  __device__ void keep(unsigned piece, const float (&values)[kWidth]) const {
#pragma unroll
    for (int k = 0; k < kWidth; k += kPart) {
      float part[kPart];
#pragma unroll
      for (int i = 0; i < kPart; ++i) part[i] = values[k + i];
      memory[k / kPart * pieces + piece] = Part::of(part);
    }
  }
  __device__ void read(unsigned piece, float (&values)[kWidth]) const {
#pragma unroll
    for (int k = 0; k < kWidth; k += kPart) {
      float part[kPart];
      memory[k / kPart * pieces + piece].read(part);
#pragma unroll
      for (int i = 0; i < kPart; ++i) values[k + i] = part[i];
    }
  }
};

// As sum_up_both(), of one of several groups of whole warps in a block: `scratch` has a place for
// each of a block's warps, and those of a group lie beside each other.
__device__ void sum_up_group(float (&sums)[2], unsigned group, float2 (&scratch)[32]) {
  const bool is_second = (threadIdx.x & 16) != 0;
  float sum = is_second ? sums[1] : sums[0];
  sum += __shfl_xor_sync(~0u, is_second ? sums[0] : sums[1], 16);
#pragma unroll
  for (unsigned distance = 8; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(~0u, sum, distance);
  }
  if (group == 32) {
    const float other = __shfl_xor_sync(~0u, sum, 16);
    sums[0] = is_second ? other : sum;
    sums[1] = is_second ? sum : other;
    return;
  }
  if (threadIdx.x % 16 == 0) ((float*)&scratch[threadIdx.x / 32])[is_second] = sum;
  meet_in_group(group);
  sums[0] = sums[1] = 0;
  const unsigned first = threadIdx.x / group * (group / 32);
  for (unsigned warp = first; warp < first + group / 32; ++warp) {
    sums[0] += scratch[warp].x;
    sums[1] += scratch[warp].y;
  }
}

// Adds up what the groups of a block have of a sample, and keeps it. `memory` is theirs once all
// have come here.
template <int kSums, int kVectors, int kWidth>
__device__ void keep_sums_of_block(const AdaptiveNormCall& call, unsigned sample,
                                   const Sums<kSums, kWidth> (&sums)[kVectors], void* memory) {
  using Columns = BlockColumns<kWidth>;
  constexpr int kPart = Columns::kPart;
  const unsigned group = call.group, groups = blockDim.x / group;
  const unsigned thread = threadIdx.x % group, vectors = call.columns / kWidth;
  const Columns all{(typename Columns::Part*)memory, kVectors * group};
  const unsigned parts = all.parts();
  const auto of_group = [&](unsigned kind, unsigned index) {
    return Columns{all.memory + (kind * groups + index) * parts, all.pieces};
  };
  wait_for_copies();
  __syncthreads();
#pragma unroll
  for (int kind = 0; kind < kSums; ++kind) {
    const Columns own = of_group(kind, threadIdx.x / group);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) own.keep(thread + v * group, sums[v][kind]);
  }
  __syncthreads();
  for (unsigned i = threadIdx.x; i < parts; i += blockDim.x) {
    const unsigned piece = i % all.pieces, part = i / all.pieces;
    if (piece >= vectors) continue;
    Sums<kSums, kPart> total = {};
#pragma unroll 4
    for (unsigned other = 0; other < groups; ++other) {
#pragma unroll
      for (int kind = 0; kind < kSums; ++kind) {
        float more[kPart];
        of_group(kind, other).memory[i].read(more);
#pragma unroll
        for (int k = 0; k < kPart; ++k) total[kind][k] += more[k];
      }
    }
    keep_sums<kSums, kPart>(call, blockIdx.x, sample, piece * Columns::kParts + part, total);
  }
  __syncthreads();
}

// The parts of samples, of 32 columns of one at a time, which some warps of a block share: in each
// of them four threads the parts of the same four columns.
template <int kSums>
__device__ void add_up_parts(const AdaptiveNormCall& call, void* memory) {
  using Four = Piece<Float, 4>;
  constexpr unsigned kFours = 8, kAtOnce = 4;  // of a warp; that memory is asked for
  const unsigned warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned most = (call.tokens - 1) / call.stretch + 2;  // parts of a sample
  unsigned share = 1;                                          // warps of a strip
  while (2 * share <= warps && 2 * kAtOnce * share < most) share *= 2;
  const unsigned fours = call.columns / 4, strips = (fours + kFours - 1) / kFours;
  const unsigned all = strips * (call.rows / call.tokens), at_once = warps / share;
  const unsigned step = share * (32 / kFours);
  Four(*const by_warp)[kSums][kFours] = (Four(*)[kSums][kFours])memory;
  for (unsigned start = blockIdx.x * at_once; start < all; start += gridDim.x * at_once) {
    const unsigned index = start + warp / share, sample = index / strips;
    const unsigned at = index % strips * kFours + lane % kFours;
    const unsigned first = sample * call.tokens / call.stretch;
    const unsigned last = (sample * call.tokens + call.tokens - 1) / call.stretch;
    // Of a single worker's sample that has written the gradients.
    const bool is_there = warp / share < at_once && index < all && at < fours && first < last;
    Sums<kSums, 4> sums = {};
    const unsigned own = first + warp % share * (32 / kFours) + lane / kFours;
    for (unsigned from = own; is_there && from <= last; from += kAtOnce * step) {
      Four parts[kAtOnce][kSums];
#pragma unroll
      for (unsigned i = 0; i < kAtOnce; ++i) {
        const unsigned worker = min(from + i * step, last);
#pragma unroll
        for (int kind = 0; kind < kSums; ++kind) {
          // The sample begins in the first worker's rows, be it at the beginning.
          const float* part = partial_of(call, worker, worker == first, kSums, kind);
          parts[i][kind] = load_whole((const Four*)part + at);
        }
      }
#pragma unroll
      for (unsigned i = 0; i < kAtOnce; ++i) {
        if (from + i * step > last) continue;
#pragma unroll
        for (int kind = 0; kind < kSums; ++kind) parts[i][kind].add_to(sums[kind]);
      }
    }
#pragma unroll
    for (int kind = 0; kind < kSums; ++kind) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (unsigned distance = kFours; distance < 32; distance *= 2) {
          sums[kind][k] += __shfl_xor_sync(~0u, sums[kind][k], distance);
        }
      }
    }
    if (share > 1) {
      __syncthreads();
      if (lane < kFours) {
#pragma unroll
        for (int kind = 0; kind < kSums; ++kind) by_warp[warp][kind][lane] = Four::of(sums[kind]);
      }
      __syncthreads();
    }
    if (!is_there || warp % share > 0 || lane >= kFours) continue;
    for (unsigned other = 1; other < share; ++other) {
#pragma unroll
      for (int kind = 0; kind < kSums; ++kind) by_warp[warp + other][kind][lane].add_to(sums[kind]);
    }
    write_gradients<kSums, 4>(call, sample, at, sums);
  }
}

// What the columns of a sample are multiplied by, for all groups of the block.
template <int kWidth>
__device__ void keep_factors_of_block(const AdaptiveNormCall& call, unsigned sample,
                                      const BlockColumns<kWidth>& factors,
                                      const BlockColumns<kWidth>* gates) {
  __syncthreads();  // all have done with those of the sample before
  for (unsigned at = threadIdx.x; at < call.columns / kWidth; at += blockDim.x) {
    float values[kWidth];
    read_factors(call, sample, at, values);
    factors.keep(at, values);
    if (gates == nullptr) continue;
    gate_of(call, sample).read(at, values);
    gates->keep(at, values);
  }
  __syncthreads();
}

// Rows of up to two pieces a thread: what is computed for a row's sums stays in registers until its
// gradient is.
template <int kStages, bool kIsGated>
__device__ void backward_blocks(const AdaptiveNormCall& call) {
  constexpr int kVectors = 2, kWidth = 16 / sizeof(Bits);
  constexpr int kSums = kIsGated ? 3 : 2, kTensors = kIsGated ? 4 : 2;
  using Vector = Piece<Type, kWidth>;
  using Columns = BlockColumns<kWidth>;
  using Pipe = Pipeline<16, kVectors, kStages, kTensors>;
  __shared__ float2 scratch[2][32];
  const unsigned group = call.group, groups = blockDim.x / group;
  const unsigned thread = threadIdx.x % group, vectors = call.columns / kWidth;
  const unsigned begin = blockIdx.x * call.stretch, end = min(begin + call.stretch, call.rows);
  const Pipe pipe{group, call.row_bytes};
  const Columns factors{(typename Columns::Part*)pipe.behind(), kVectors * group};
  const Columns gates{factors.memory + factors.parts(), factors.pieces};
  const bool has_more = call.grad_sum.data != nullptr;
  const float per_column = 1.0f / call.columns;
  wait_for_inputs();
  let_next_start();
  for (unsigned first = begin; first < end;) {
    const unsigned sample = first / call.tokens, stop = min((sample + 1) * call.tokens, end);
    const auto load = [&](unsigned row, unsigned stage) {
      if (row < stop) {
        pipe.load(stage, 0, row_of(call.input, row), vectors);
        pipe.load(stage, 1, row_of(call.grad_out, row), vectors);
        if constexpr (kIsGated) {
          pipe.load(stage, 2, row_of(call.update, row), vectors);
          if (has_more) pipe.load(stage, 3, row_of(call.grad_sum, row), vectors);
        }
      }
      Pipe::commit();
    };
    // Asked for a turn ahead, as the rows are.
    float next_rstd = 0, next_mean = 0;
    const auto load_moments = [&](unsigned row) {
      if (row >= stop) return;
      next_rstd = call.rstd[row];
      if (call.is_layer) next_mean = call.mean[row];
    };
    unsigned row = first + threadIdx.x / group;
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) load(row + stage * groups, stage);
    load_moments(row);
    keep_factors_of_block<kWidth>(call, sample, factors, kIsGated ? &gates : nullptr);
    Sums<kSums, kWidth> sums[kVectors] = {};
    unsigned stage = 0, freed = kStages - 1, turn = 0;
    for (; row < stop; row += groups, ++turn) {
      load(row + (kStages - 1) * groups, freed);
      const float rstd = next_rstd, mean = next_mean;
      load_moments(row + groups);
      pipe.wait();
      const auto read = [&](int v, int tensor, float (&values)[kWidth]) {
        pipe.pieces(stage, tensor, nullptr)[v].read(values);
      };
      float of_row[2] = {}, normed[kVectors][kWidth], slopes[kVectors][kWidth];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const unsigned at = thread + v * group;
        if (at >= vectors) continue;
        float own[kWidth];
        read(v, 0, normed[v]);
        read(v, 1, slopes[v]);
        factors.read(at, own);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          normed[v][k] = (normed[v][k] - mean) * rstd;
          sums[v][0][k] += slopes[v][k] * normed[v][k];
          sums[v][1][k] += slopes[v][k];
          slopes[v][k] *= own[k];
          of_row[0] += slopes[v][k] * normed[v][k];
          of_row[1] += slopes[v][k];
        }
      }
      sum_up_group(of_row, group, scratch[turn % 2]);
      const float along = -of_row[0] * per_column * rstd;
      const float shift = call.is_layer ? -of_row[1] * per_column * rstd : 0;
      const long long dense = (long long)row * vectors;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const unsigned at = thread + v * group;
        if (at >= vectors) continue;
        float result[kWidth];
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          result[k] = normed[v][k] * along + shift + slopes[v][k] * rstd;
        }
        if (has_more) {
          float more[kWidth];
          if constexpr (kIsGated) {
            read(v, 3, more);
          } else {
            ((const Vector*)row_of(call.grad_sum, row))[at].read(more);
          }
#pragma unroll
          for (int k = 0; k < kWidth; ++k) result[k] += more[k];
        }
        if (call.out != nullptr) ((Vector*)call.out)[dense + at] = Vector::of(result);
        if constexpr (kIsGated) {
          float updates[kWidth];
          read(v, 2, updates);
#pragma unroll
          for (int k = 0; k < kWidth; ++k) sums[v][2][k] += result[k] * updates[k];
          if (call.grad_update != nullptr) {
            float own[kWidth];
            gates.read(at, own);
#pragma unroll
            for (int k = 0; k < kWidth; ++k) result[k] *= own[k];
            ((Vector*)call.grad_update)[dense + at] = Vector::of(result);
          }
        }
      }
      freed = stage;
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    keep_sums_of_block(call, sample, sums, pipe.begin());
    first = stop;
  }
  if (call.partial == nullptr) return;
  wait_for_grid(arrive_at_grid());
  add_up_parts<kSums>(call, pipe.begin());
}
