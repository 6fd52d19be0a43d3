// Numbers of 8 bits, read to and written from float32, and pieces of memory full of them. Written
// to the nearest, ties to even; what is larger than the largest becomes that, and NaN stays NaN.
#pragma once

#include "number.cuh"

// GPUs from compute capability 8.9 on convert by an instruction each two numbers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define FP8_INSTRUCTIONS 1
#else
#define FP8_INSTRUCTIONS 0
#endif

// kMantissa bits of fraction, and an exponent that is one of float32 less kLeast for the smallest
// normal number, 2^kLeast.
template <int kMantissa, int kLeast>
__device__ unsigned char to_fp8(float value, float most) {
  const unsigned bits = __float_as_uint(value), sign = bits >> 24 & 0x80;
  const unsigned magnitude_bits = bits & 0x7fffffff;
  if (magnitude_bits > 0x7f800000) return sign | 0x7f;
  const float magnitude = fminf(__uint_as_float(magnitude_bits), most);
  // Below the normal numbers they lie as far apart as there: in the last bits of such a sum.
  const float shifter = __uint_as_float((unsigned)(127 + kLeast + 23 - kMantissa) << 23);
  const float least = __uint_as_float((unsigned)(127 + kLeast) << 23);
  if (magnitude < least) {
    return sign | (__float_as_uint(magnitude + shifter) - __float_as_uint(shifter));
  }
  constexpr int kDropped = 23 - kMantissa;
  const unsigned whole = __float_as_uint(magnitude);
  const unsigned rounded = whole + (1u << (kDropped - 1)) - 1 + (whole >> kDropped & 1);
  return sign | ((rounded >> kDropped) - ((unsigned)(126 + kLeast) << kMantissa));
}

struct E4M3 {
  using Bits = unsigned char;
  static constexpr float kMost = 448;
  static __device__ float read(Bits bits) {
    if ((bits & 0x7f) == 0x7f) return __uint_as_float(0x7fc00000);
    // As a number of float32 with the same exponent's bits, 2^120 times less.
    const unsigned wide = (unsigned)(bits & 0x80) << 24 | (unsigned)(bits & 0x7f) << 20;
    return __uint_as_float(wide) * __uint_as_float(247u << 23);
  }
  static __device__ Bits write(float value) {
    return (Bits)write(value, 0);
  }
  static __device__ unsigned short write(float low, float high) {
#if FP8_INSTRUCTIONS
    unsigned short bits;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
    return bits;
#else
    return to_fp8<3, -6>(low, kMost) | to_fp8<3, -6>(high, kMost) << 8;
#endif
  }
};

// Two numbers of E4M3 as two of float16, which has all of them.
__device__ unsigned e4m3_to_half(unsigned short bits) {
#if FP8_INSTRUCTIONS
  unsigned halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(bits));
  return halves;
#else
  // With the same exponent's bits they are 2^8 times less.
  const unsigned high = __byte_perm(bits, 0, 0x1404), magnitudes = high & 0x7f007f00;
  const unsigned less = (high & 0x80008000) | magnitudes >> 1;
  unsigned halves;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(less), "r"(0x5c005c00));
  const unsigned nan = (magnitudes + 0x01000100) & 0x80008000;
  return halves | (nan - (nan >> 6));
#endif
}

// Four of them. As halves of a word the conversions take them as they are; shifted, each high one
// would first be moved.
__device__ void e4m3_to_halves(unsigned word, unsigned& low, unsigned& high) {
#if FP8_INSTRUCTIONS
  unsigned short first, second;
  asm("mov.b32 {%0, %1}, %2;" : "=h"(first), "=h"(second) : "r"(word));
  low = e4m3_to_half(first);
  high = e4m3_to_half(second);
#else
  low = e4m3_to_half((unsigned short)word);
  high = e4m3_to_half((unsigned short)(word >> 16));
#endif
}

struct E5M2 {
  using Bits = unsigned char;
  static constexpr float kMost = 57344;
  static __device__ float read(Bits bits) {
    if ((bits & 0x7f) > 0x7c) return __uint_as_float(0x7fc00000);
    if ((bits & 0x7f) == 0x7c) return __uint_as_float((unsigned)(bits & 0x80) << 24 | 0x7f800000);
    const unsigned wide = (unsigned)(bits & 0x80) << 24 | (unsigned)(bits & 0x7f) << 21;
    return __uint_as_float(wide) * __uint_as_float(239u << 23);
  }
  static __device__ Bits write(float value) {
    return (Bits)write(value, 0);
  }
  static __device__ unsigned short write(float low, float high) {
#if FP8_INSTRUCTIONS
    unsigned short bits;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
    return bits;
#else
    return to_fp8<2, -14>(low, kMost) | to_fp8<2, -14>(high, kMost) << 8;
#endif
  }
};

// kWidth of them that are loaded and stored at once.
template <class Type, int kWidth>
struct alignas(kWidth) Fp8Piece {
  typename Type::Bits bits[kWidth];

  __device__ void read(float (&values)[kWidth]) const {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] = Type::read(bits[k]);
  }
  static __device__ Fp8Piece of(const float (&values)[kWidth]) {
    if constexpr (kWidth == 1) {
      return {{Type::write(values[0])}};
    } else {
      union {
        unsigned short words[kWidth / 2];
        Fp8Piece piece;
      } both;
#pragma unroll
      for (int k = 0; k < kWidth; k += 2) both.words[k / 2] = Type::write(values[k], values[k + 1]);
      return both.piece;
    }
  }
};

// The same as torch's amax / largest, with 1 where nothing is there to scale by.
__device__ float scale_of(unsigned amax, float most) {
  constexpr float kLargest = 8.507059173023462e37f;  // 2^126: its inverse is a normal number
  const float magnitude = __uint_as_float(amax);
  if (amax == 0 || amax >= 0x7f800000) return 1;
  return fminf(most / magnitude, kLargest);
}

// The largest power of two that is no larger: of a normal number, its exponent alone.
__device__ float power_below(float scale) {
  return __uint_as_float(__float_as_uint(scale) & 0x7f800000);
}

// NaN where one of them is.
__device__ float larger(float one, float other) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(one), "f"(other));
  return most;
}

// The largest magnitude, as bits: NaN is larger than all numbers. One instruction a number.
template <int kWidth>
__device__ unsigned largest(unsigned most, const float (&values)[kWidth]) {
  float magnitude = __uint_as_float(most);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) magnitude = larger(magnitude, fabsf(values[k]));
  return __float_as_uint(magnitude);
}
