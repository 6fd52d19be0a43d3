// Rows that no pieces of 16 bytes fit, a few numbers of one in the registers of each thread.
#pragma once

#include "norm_rows.cuh"

// A row of which a thread has kNumbers at most, one of every `step`. kStep: that, or 0 for as many
// as the threads that share the row, of one warp.
template <int kNumbers, unsigned kStep>
struct Numbers {
  unsigned start, step, end;

  __device__ Numbers(unsigned group, unsigned columns) : step(kStep > 0 ? kStep : group) {
    const unsigned thread = threadIdx.x % group;
    start = thread / step * (kNumbers * step) + thread % step;
    end = columns;
  }
  // Calls `visit` with the index of each of the thread's numbers, and how far behind `start` it is.
  template <class Visit>
  __device__ void each(const Visit& visit) const {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      if (start + i * step < end) visit(i, i * step);
    }
  }
  template <class To>
  __device__ void load(const Bits* row, To (&numbers)[kNumbers]) const {
    const auto* from = (const Piece<Type, 1>*)row + start;
    each([&](int i, unsigned further) { numbers[i] = from[further]; });
  }
  // Of which type they are is asked once, and not for each of them.
  __device__ void load(const Parameter& parameter, float (&values)[kNumbers]) const {
    if (parameter.data == nullptr) {
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) values[i] = parameter.otherwise;
      return;
    }
    if (parameter.is_float) {
      const float* from = (const float*)parameter.data + start;
      each([&](int i, unsigned further) { values[i] = from[further]; });
    } else {
      const Bits* from = (const Bits*)parameter.data + start;
      each([&](int i, unsigned further) { values[i] = Type::read(from[further]); });
    }
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) values[i] += parameter.shift;
  }
};
