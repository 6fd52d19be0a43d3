// Rows that no pieces of 16 bytes fit, a few numbers of one in the registers of each thread.
#pragma once

#include "norm_rows.cuh"

// As loaded.
__device__ Bits bits_of(unsigned loaded) {
  if constexpr (sizeof(Bits) == sizeof(float)) {
    return __uint_as_float(loaded);
  } else {
    return (Bits)loaded;
  }
}

__device__ float number_of(unsigned loaded) {
  return Type::read(bits_of(loaded));
}

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
  // Of a row, as the bits that they are of; zeros behind the row's end.
  template <class From>
  __device__ void load(const From* row, unsigned (&numbers)[kNumbers]) const {
    const From* from = row + start;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) numbers[i] = 0;
    each([&](int i, unsigned further) {
      if constexpr (sizeof(From) == sizeof(float)) {
        numbers[i] = __float_as_uint(from[further]);
      } else {
        numbers[i] = from[further];
      }
    });
  }
  // kIsUsual: they are there, and of the rows' type. Else that is asked once, and not for each.
  template <bool kIsUsual>
  __device__ void load(const Parameter& parameter, unsigned (&numbers)[kNumbers]) const {
    if (!kIsUsual && parameter.data == nullptr) {
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) numbers[i] = 0;
    } else if (!kIsUsual && parameter.is_float) {
      load((const float*)parameter.data, numbers);
    } else {
      load((const Bits*)parameter.data, numbers);
    }
  }
  template <bool kIsUsual>
  __device__ void read(const Parameter& parameter, const unsigned (&numbers)[kNumbers],
                       float (&values)[kNumbers]) const {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      if (!kIsUsual && parameter.data == nullptr) {
        values[i] = parameter.otherwise;
      } else if (!kIsUsual && parameter.is_float) {
        values[i] = __uint_as_float(numbers[i]) + parameter.shift;
      } else {
        values[i] = number_of(numbers[i]) + parameter.shift;
      }
    }
  }
};

// What was loaded is read behind this: the compiler would else read each number where it is loaded,
// and wait for it before it loads the next.
template <int kNumbers>
__device__ void all_are_asked_for(unsigned (&numbers)[kNumbers]) {
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) asm volatile("" : "+r"(numbers[i]));
}
