// The numbers that tensors are made of, read to and written from float32. For NVRTC, which has no
// headers of CUDA's own for them here.
#pragma once

struct Half {
  using Bits = unsigned short;
  static __device__ float read(Bits bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
  static __device__ Bits write(float value) {
    Bits bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
};

struct BFloat16 {
  using Bits = unsigned short;
  static __device__ float read(Bits bits) {
    return __uint_as_float((unsigned)bits << 16);
  }
  static __device__ Bits write(float value) {
    Bits bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
};

struct Float {
  using Bits = float;
  static __device__ float read(Bits bits) {
    return bits;
  }
  static __device__ Bits write(float value) {
    return value;
  }
};
