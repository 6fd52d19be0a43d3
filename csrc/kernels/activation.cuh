// Activations, in float32: each gives its value and its slope.
#pragma once

// 1 / x for x from 1 on, as a division rounds it; but 0 for what is smaller than any normal number.
// A division branches for what is not there, and around its branches nothing else is computed.
__device__ inline float reciprocal_from_one(float x) {
  float near;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
  const float nearer = fmaf(near, fmaf(-x, near, 1), near);
  return x < 0x1p126f ? nearer : near;  // of infinity: 0, for which no step is left to take
}

struct Silu {
  static __device__ float2 of(float x) {
    const float s = reciprocal_from_one(1 + expf(-x));
    return {x * s, s * (1 + x * (1 - s))};
  }
};

struct Gelu {
  static __device__ float2 of(float x) {
    const float below = fmaf(0.5f, erff(x * 0.70710678118654752f), 0.5f);
    return {x * below, below + x * 0.39894228040143268f * expf(-0.5f * x * x)};
  }
};

struct GeluTanh {
  static __device__ float2 of(float x) {
    const float a = 0.79788456080286536f, b = 0.044715f;
    const float t = tanhf(a * (x + b * x * x * x));
    return {0.5f * x * (1 + t), 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * a * (1 + 3 * b * x * x)};
  }
};

struct Relu {
  static __device__ float2 of(float x) {
    return {x <= 0 ? 0 : x, x <= 0 ? 0.0f : 1.0f};  // of NaN: NaN, and 1
  }
};

struct Relu6 {
  static __device__ float2 of(float x) {
    return {x <= 0 ? 0 : x >= 6 ? 6 : x, x <= 0 || x >= 6 ? 0.0f : 1.0f};
  }
};

struct HardSwish {
  static __device__ float2 of(float x) {
    if (x <= -3) return {0, 0};
    if (x >= 3) return {x, 1};
    return {x * (x + 3) / 6, x / 3 + 0.5f};
  }
};

struct LeakyRelu {
  static __device__ float2 of(float x) {
    constexpr float kSlope = 0.01f;  // torch's default
    return {x > 0 ? x : kSlope * x, x > 0 ? 1 : kSlope};
  }
};

struct None {
  static __device__ float2 of(float x) {
    return {x, 1};
  }
};
