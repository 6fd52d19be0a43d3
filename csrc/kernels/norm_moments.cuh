// Rows that stay in the registers of the threads that share them, and what a norm needs of them:
// the mean and 1 / deviation.
#pragma once

#include "mean.cuh"
#include "norm_rows.cuh"

// Calls `visit` with the index of each of a thread's pieces, and where in the row it is; kIsFull:
// every thread has kVectors of them.
template <int kVectors, bool kIsFull, class Visit>
__device__ void each(unsigned group, unsigned vectors, const Visit& visit) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const unsigned at = threadIdx.x % group + v * group;
    if (kIsFull || at < vectors) visit(v, at);
  }
}

constexpr unsigned kExactColumns = 1u << (24 - Type::kDigits);

constexpr unsigned kMostThreads = 1024;  // that share a row

struct Moments {
  float mean, rstd;
};

// The pieces that each() visits.
template <int kVectors, bool kIsFull>
struct EachPiece {
  unsigned group, vectors;

  template <class Visit>
  __device__ void each(const Visit& visit) const {
    ::each<kVectors, kIsFull>(group, vectors, visit);
  }
};

// Of the row that a thread has `pieces` of: `places.each` calls what it is given with the index of
// each of them. Every thread must come here, those of no row too. `call` has the sizes, and `first`
// gives a row's first number. RMS norm has no mean.
template <class Places, int kVectors, int kWidth, class Call, class First>
__device__ Moments moments_by(const Places& places, Piece<Type, kWidth> (&pieces)[kVectors],
                              bool is_row, const Call& call, bool is_layer, const First& first,
                              float (*scratch)[32]) {
  const unsigned group = call.group;
  const float per_column = 1.0f / call.columns;
  float sums[1] = {0};
  float mean = 0;
  if (is_layer) {
    float base = 0;
    if constexpr (kVectors * kWidth * kMostThreads > kExactColumns) {
      if (is_row) base = first();
    }
    const Mean mean_of(call.columns, per_column, base);
    places.each([&](int v, unsigned) {
      float values[kWidth];
      pieces[v].read(values);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) mean_of.add(values[k], sums[0]);
    });
    sum_up(sums, group, scratch);
    stay_packed(pieces);
    mean = mean_of.of(sums[0]);
    sums[0] = 0;
  }
  places.each([&](int v, unsigned) {
    float values[kWidth];
    pieces[v].read(values);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sums[0] += (values[k] - mean) * (values[k] - mean);
  });
  sum_up(sums, group, scratch + 1);
  stay_packed(pieces);
  return {mean, rsqrtf(sums[0] * per_column + call.eps)};
}

// Of pieces that lie as each() has them, `vectors` in all; 0: of no row.
template <bool kIsFull, int kVectors, int kWidth, class Call, class First>
__device__ Moments moments_of(Piece<Type, kWidth> (&pieces)[kVectors], unsigned vectors,
                              const Call& call, bool is_layer, const First& first,
                              float (*scratch)[32]) {
  const EachPiece<kVectors, kIsFull> places{call.group, vectors};
  return moments_by(places, pieces, vectors > 0, call, is_layer, first, scratch);
}
