// The mean of numbers that stay in registers.
#pragma once

#include "number.cuh"

// Numbers unpacked before this are unpacked again behind it: kept, they would take twice the
// registers, which decide how many blocks a multiprocessor has.
template <class Type, int kVectors, int kWidth>
__device__ void stay_packed(Piece<Type, kWidth> (&pieces)[kVectors]) {
  if constexpr (Piece<Type, kWidth>::kIsPaired) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int k = 0; k < kWidth / 2; ++k) asm volatile("" : "+r"(((unsigned*)pieces[v].bits)[k]));
    }
  }
}

// The mean of a row. Its numbers are added up by a power of two, one of their count or less, for
// the sum of large ones to stay finite; and exactly where there are not too many for their digits,
// else less the first of them. Equal numbers so are their own mean: a little beside it all of them
// would be far from zero where eps is small.
struct Mean {
  float scale, count, inverse, base;

  __device__ Mean(unsigned columns, float per_column, float base) : base(base) {
    const unsigned exponent = 32 - __clz(columns - 1);
    scale = __uint_as_float((127 - exponent) << 23);
    count = columns * scale;
    inverse = per_column * __uint_as_float((127 + exponent) << 23);
  }
  __device__ void add(float value, float& sum) const {
    sum += (value - base) * scale;
  }
  // As exact as a division, in less time.
  __device__ float of(float sum) const {
    const float quotient = sum * inverse;
    return base + fmaf(fmaf(-count, quotient, sum), inverse, quotient);
  }
};
