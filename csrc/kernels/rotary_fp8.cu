// Query and key, normed and turned, and value, rounded to numbers of 8 bits. Compiled when the
// package is built (cmake/compile_kernels.py); rotary_fp8_cuda.cpp launches it.
//
// A row stays in the registers of the threads that share it. Those of a token follow each other, so
// that its cosines and sines come from the nearest cache for all heads but the first.

#include "fp8.cuh"
#include "rotary.cuh"
#include "rotary_fp8_call.h"
#include "threads.cuh"

// Which head of which tensor a row is.
struct Fp8Row {
  RotaryHeads heads;
  const void* weight;
  unsigned head, batch, token, scale;
  unsigned half, pieces;  // `half` as in RotaryAnyCall: 0 where nothing turns
  long long pixel;

  __device__ Fp8Row(const RotaryFp8Call& call, long long row) {
    const auto& turn = call.turn;
    const unsigned queries = turn.query.heads, keys = turn.key.heads;
    const unsigned all = queries + keys + call.value.heads;
    // A long division takes longer than the rest.
    pixel = call.rows >> 32 ? row / all : (unsigned)row / all;
    head = row - pixel * all;
    batch = pixel / turn.tokens;
    token = pixel - (long long)batch * turn.tokens;
    half = turn.half;
    pieces = turn.pieces;
    if (head < queries) {
      heads = turn.query;
      weight = call.query_weight;
      scale = 0;
    } else if (head < queries + keys) {
      heads = turn.key;
      head -= queries;
      weight = call.key_weight;
      scale = 1;
    } else {
      heads = call.value;
      head -= queries + keys;
      weight = nullptr;
      scale = 2 + (call.value_scales > 1 ? head : 0);
      half = 0;
      pieces = call.value_pieces;
    }
  }
};

// The two pieces of a row that are one item, as in rotary.cu: half apart, or neighbours.
struct Fp8Item {
  unsigned first, second;
  bool is_turned, has_first, has_second;

  __device__ Fp8Item(const Fp8Row& row, unsigned item, bool is_neighbour) {
    is_turned = item < row.half;
    if (is_turned) {
      first = is_neighbour ? 2 * item : item;
      second = is_neighbour ? 2 * item + 1 : item + row.half;
      has_first = has_second = true;
      return;
    }
    const unsigned copied = row.pieces - 2 * row.half, apart = (copied + 1) / 2;
    first = item + row.half;
    second = first + apart;
    has_first = item - row.half < apart;
    has_second = has_first && second < row.pieces;
  }
};

template <class Type, int kWidth>
__device__ void weigh(const RotaryFp8Call& call, const void* weight, unsigned piece, float rstd,
                      float (&values)[kWidth]) {
  float factors[kWidth];
  if (call.is_weight_float) {
    read_piece<Float>(weight, piece, factors);
  } else {
    read_piece<Type>(weight, piece, factors);
  }
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    values[k] = values[k] * rstd * (call.zero_centered ? 1 + factors[k] : factors[k]);
  }
}

template <class Angle, bool kInside, int kWidth>
__device__ void turn_item(const RotaryAnyCall& call, const Fp8Row& row, unsigned item,
                          float (&first)[kWidth], float (&second)[kWidth]) {
  constexpr unsigned kPairs = kInside ? kWidth / 2 : kWidth;  // of a piece
  const FactorRow of_first = factor_row(call, item * kPairs, row.batch, row.token);
  const FactorRow of_second =
      kInside ? factor_row(call, (item + call.half) * kPairs, row.batch, row.token) : of_first;
  float cos_first[kWidth], cos_second[kWidth], sin_first[kWidth], sin_second[kWidth];
  read_factors<Angle, kInside>(call, call.cos, of_first, of_second, row.batch, item, cos_first,
                               cos_second);
  read_factors<Angle, kInside>(call, call.sin, of_first, of_second, row.batch, item, sin_first,
                               sin_second);
  if constexpr (kInside) {
    turn_neighbours(first, cos_first, sin_first, false);
    turn_neighbours(second, cos_second, sin_second, false);
  } else {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      turn(first[k], second[k], cos_first[k], cos_second[k], sin_first[k], sin_second[k], false);
    }
  }
}

template <int kWidth>
__device__ void put_fp8(void* out, long long piece, float scale, bool is_e5m2,
                        float (&values)[kWidth]) {
#pragma unroll
  for (int k = 0; k < kWidth; ++k) values[k] *= scale;
  if (is_e5m2) {
    ((Fp8Piece<E5M2, kWidth>*)out)[piece] = Fp8Piece<E5M2, kWidth>::of(values);
  } else {
    ((Fp8Piece<E4M3, kWidth>*)out)[piece] = Fp8Piece<E4M3, kWidth>::of(values);
  }
}

// A row's items in a thread's registers: every threads' of the group.
template <class Type, class Angle, bool kInside, int kWidth, int kItems>
struct Fp8Items {
  float first[kItems][kWidth], second[kItems][kWidth];

  // Calls `visit` with the index of each item that the row has, and where its pieces are.
  template <class Visit>
  static __device__ void each(const RotaryFp8Call& call, const Fp8Row& row, const Visit& visit) {
    const bool is_neighbour = kWidth == 1 && call.turn.is_interleaved;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const unsigned item = threadIdx.x % call.group + i * call.group;
      const Fp8Item pieces(row, item, is_neighbour);
      if (pieces.has_first) visit(i, item, pieces);
    }
  }

  __device__ void load(const RotaryFp8Call& call, const Fp8Row& row) {
    const auto& heads = row.heads;
    const void* x = (const typename Type::Bits*)heads.input + row.batch * heads.batch_stride +
                    row.head * heads.head_stride + row.token * heads.token_stride;
    each(call, row, [&](int i, unsigned, const Fp8Item& pieces) {
      read_piece<Type>(x, pieces.first, first[i]);
      if (pieces.has_second) read_piece<Type>(x, pieces.second, second[i]);
    });
  }

  __device__ float squares(const RotaryFp8Call& call, const Fp8Row& row) const {
    float sum = 0;
    each(call, row, [&](int i, unsigned, const Fp8Item& pieces) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        sum += first[i][k] * first[i][k];
        if (pieces.has_second) sum += second[i][k] * second[i][k];
      }
    });
    return sum;
  }

  __device__ void norm(const RotaryFp8Call& call, const Fp8Row& row, float rstd) {
    each(call, row, [&](int i, unsigned, const Fp8Item& pieces) {
      weigh<Type>(call, row.weight, pieces.first, rstd, first[i]);
      if (pieces.has_second) weigh<Type>(call, row.weight, pieces.second, rstd, second[i]);
    });
  }

  // Turns the row, and writes it unless only its largest magnitude is wanted, which it returns.
  __device__ unsigned finish(const RotaryFp8Call& call, const Fp8Row& row, float scale) {
    unsigned most = 0;
    const long long start = (row.pixel * row.heads.heads + row.head) * row.pieces;
    each(call, row, [&](int i, unsigned item, const Fp8Item& pieces) {
      if (pieces.is_turned) {
        turn_item<Angle, kInside>(call.turn, row, item, first[i], second[i]);
      }
      most = largest(most, first[i]);
      if (pieces.has_second) most = largest(most, second[i]);
      if (call.descales == nullptr) return;
      put_fp8(row.heads.out, start + pieces.first, scale, call.is_e5m2, first[i]);
      if (pieces.has_second) {
        put_fp8(row.heads.out, start + pieces.second, scale, call.is_e5m2, second[i]);
      }
    });
    return most;
  }
};

// Two passes where no scale is known: the first is for the largest magnitudes alone, and the second
// begins with the rows that the first read last, which are still in the cache.
template <class Type, class Angle, bool kInside, int kWidth, int kItems>
__device__ void rotary_fp8(const RotaryFp8Call& call) {
  __shared__ unsigned most_of[kMostScales];
  __shared__ float scales[kMostScales];
  const unsigned count = 2 + call.value_scales;
  const bool is_known = call.scales != nullptr, is_rounded = call.descales != nullptr;
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
    const float most = call.is_e5m2 ? E5M2::kMost : E4M3::kMost;
    most_of[i] = 0;
    scales[i] = !is_rounded ? 1 : is_known ? call.scales[i] : scale_of(call.amax[i], most);
    if (is_rounded && blockIdx.x == 0) call.descales[i] = 1 / scales[i];
  }
  __syncthreads();
  const unsigned rows_of_block = blockDim.x / call.group;
  const long long step = (long long)gridDim.x * rows_of_block;
  const bool is_second = is_rounded && !is_known;
  // A warp's threads go round together: they add up squares.
  for (long long start = (long long)blockIdx.x * rows_of_block; start < call.rows; start += step) {
    const long long at = start + threadIdx.x / call.group;
    const bool is_there = at < call.rows;
    const Fp8Row row(call, !is_there ? 0 : is_second ? call.rows - 1 - at : at);
    Fp8Items<Type, Angle, kInside, kWidth, kItems> items;
    items.load(call, row);
    if (call.query_weight != nullptr || call.key_weight != nullptr) {
      const float sum = sum_within_warp(items.squares(call, row), call.group);
      if (row.weight != nullptr) items.norm(call, row, rsqrtf(sum / call.size + call.eps));
    }
    if (!is_there) continue;
    const unsigned most = items.finish(call, row, scales[row.scale]);
    if (!is_second && most > most_of[row.scale]) atomicMax(most_of + row.scale, most);
  }
  __syncthreads();
  if (is_second) return;
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
    if (most_of[i] > call.amax[i]) atomicMax(call.amax + i, most_of[i]);
  }
}

#define ROTARY_FP8_KERNEL(name, ...)                     \
  extern "C" __global__ void __launch_bounds__(256)      \
      name(const __grid_constant__ RotaryFp8Call call) { \
    rotary_fp8<__VA_ARGS__>(call);                       \
  }
#define ROTARY_FP8(Type, Angle, name, wide)                                       \
  ROTARY_FP8_KERNEL(rotary_fp8_##name##_##wide, Type, Angle, false, wide, 1)      \
  ROTARY_FP8_KERNEL(rotary_fp8_pairs_##name##_##wide, Type, Angle, true, wide, 1) \
  ROTARY_FP8_KERNEL(rotary_fp8_##name##_1, Type, Angle, false, 1, 4)

ROTARY_FP8(Half, Half, half, 8)
ROTARY_FP8(Half, Float, half_float, 8)
ROTARY_FP8(BFloat16, BFloat16, bfloat16, 8)
ROTARY_FP8(BFloat16, Float, bfloat16_float, 8)
ROTARY_FP8(Float, Float, float, 4)
