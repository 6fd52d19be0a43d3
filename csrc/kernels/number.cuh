// The numbers that tensors are made of, read to and written from float32, and pieces of memory full
// of them. For NVRTC, which has no headers of CUDA's own for them here.
#pragma once

struct Half {
  using Bits = unsigned short;
  static constexpr int kDigits = 11;  // binary ones, that are significant
  static __device__ float read(Bits bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
  static __device__ void read(unsigned bits, float& low, float& high) {
    low = read((Bits)bits);
    high = read((Bits)(bits >> 16));
  }
  static __device__ Bits write(float value) {
    Bits bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
  static __device__ unsigned write(float low, float high) {
    unsigned bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
  }
};

struct BFloat16 {
  using Bits = unsigned short;
  static constexpr int kDigits = 8;
  static __device__ float read(Bits bits) {
    return __uint_as_float((unsigned)bits << 16);
  }
  static __device__ void read(unsigned bits, float& low, float& high) {
    low = __uint_as_float(bits << 16);
    high = __uint_as_float(bits & 0xffff0000);
  }
  static __device__ Bits write(float value) {
    Bits bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
  static __device__ unsigned write(float low, float high) {
    unsigned bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
  }
};

struct Float {
  using Bits = float;
  static constexpr int kDigits = 24;
  static __device__ float read(Bits bits) {
    return bits;
  }
  static __device__ Bits write(float value) {
    return value;
  }
};

// As many bytes as are moved by one instruction.
template <int kBytes>
struct WordOf {
  using Word = uint4;
};
template <>
struct WordOf<8> {
  using Word = uint2;
};
template <>
struct WordOf<4> {
  using Word = unsigned;
};
template <>
struct WordOf<2> {
  using Word = unsigned short;
};

// What lies at `memory`, of a type that is aligned to its size, or to 16 bytes. The compiler knows
// the alignment of what it copies, but not of what a member function reads: it would load four
// bytes at a time.
template <class Whole>
__device__ Whole load_whole(const Whole* memory) {
  using Word = typename WordOf<(sizeof(Whole) < 16 ? sizeof(Whole) : 16)>::Word;
  constexpr int kWords = sizeof(Whole) / sizeof(Word);
  union {
    Word words[kWords];
    Whole whole;
  } found;
#pragma unroll
  for (int i = 0; i < kWords; ++i) found.words[i] = ((const Word*)memory)[i];
  return found.whole;
}

// kWidth numbers that are loaded and stored at once, 16 bytes at most.
template <class Type, int kWidth>
struct alignas(sizeof(typename Type::Bits) * kWidth < 16 ? sizeof(typename Type::Bits) * kWidth
                                                         : 16) Piece {
  // Two at once are as fast as one.
  static constexpr bool kIsPaired = sizeof(typename Type::Bits) == 2 && kWidth > 1;

  typename Type::Bits bits[kWidth];

  __device__ void read(float (&values)[kWidth]) const {
    const Piece own = load_whole(this);
    if constexpr (kIsPaired) {
#pragma unroll
      for (int k = 0; k < kWidth; k += 2) {
        Type::read(((const unsigned*)own.bits)[k / 2], values[k], values[k + 1]);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) values[k] = Type::read(own.bits[k]);
    }
  }
  __device__ void add_to(float (&values)[kWidth]) const {
    float own[kWidth];
    read(own);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] += own[k];
  }
  static __device__ Piece of(const float (&values)[kWidth]) {
    Piece piece;
    if constexpr (kIsPaired) {
      union {
        unsigned words[kWidth / 2];
        Piece piece;
      } both;
#pragma unroll
      for (int k = 0; k < kWidth; k += 2) both.words[k / 2] = Type::write(values[k], values[k + 1]);
      piece = both.piece;
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) piece.bits[k] = Type::write(values[k]);
    }
    return piece;
  }
};
