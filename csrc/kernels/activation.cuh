// Activations, in float32: each gives its value and its slope.
#pragma once

// 1 / x, the last digit of which may be wrong; 0 for what is smaller than any normal number.
__device__ inline float near_reciprocal(float x) {
  float near;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
  return near;
}

// 1 / x for x from 1 on, as a division rounds it; but 0 for what is smaller than any normal number.
// A division branches for what is not there, and around its branches nothing else is computed.
__device__ inline float reciprocal_from_one(float x) {
  const float near = near_reciprocal(x);
  const float nearer = fmaf(near, fmaf(-x, near, 1), near);
  return x < 0x1p126f ? nearer : near;  // of infinity: 0, for which no step is left to take
}

// exp(x), wrong by 2^-17 of it at most; 0 for what is smaller than any normal number.
__device__ inline float near_exp(float x) {
  const float power = 1.44269504f * x;
  float near;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(power));
  return near;
}

// 1 / (1 + exp(-x)): in 5 instructions for results of so few digits, of whose last one they are
// wrong by a hundredth, and else in 13.
template <int kDigits>
__device__ inline float logistic(float x) {
  return kDigits > 11 ? reciprocal_from_one(1 + expf(-x)) : near_reciprocal(1 + near_exp(-x));
}

// For results of so many binary digits.
template <int kDigits>
struct SiluOf {
  static __device__ float2 of(float x) {
    const float s = logistic<kDigits>(x);
    return {x * s, s * (1 + x * (1 - s))};
  }
};
using Silu = SiluOf<24>;

// The normal distribution's share below -|x|, by its density e = exp(-x * x / 2), is e times a
// polynomial in 1 / (1 + p |x|): one exponential serves the value and the slope, nothing branches,
// and small shares keep their digits, which 1 + erf(x) rounds away. Fitted to erfcx by minimax;
// 2e-7 of the share at most, as far as it is not 0.
struct Gelu {
  static __device__ float2 of(float x) {
    const float t = reciprocal_from_one(fmaf(0.31112698f, fabsf(x), 1));
    const float e = exp2f(-0.72134752f * x * x);
    float share = fmaf(0.035611607f, t, -0.13897347f);
    share = fmaf(share, t, 0.14834282f);
    share = fmaf(share, t, -0.010089485f);
    share = fmaf(share, t, 0.10790567f);
    share = fmaf(share, t, 0.10865691f);
    share = fmaf(share, t, 0.12443557f);
    share = fmaf(share, t, 0.12411048f);
    share *= t * e;
    const float below = x < 0 ? share : 1 - share;
    return {x * below, fmaf(x * 0.39894228f, e, below)};
  }
};

// (1 + tanh(y)) / 2 is the logistic function of 2 y, as exact where it is small.
template <int kDigits>
struct GeluTanhOf {
  static __device__ float2 of(float x) {
    const float a = 1.5957691216057308f, b = 0.044715f;
    const float s = logistic<kDigits>(a * fmaf(b * x * x, x, x));
    return {x * s, fmaf(x * s * (1 - s), a * fmaf(3 * b * x, x, 1), s)};
  }
};
using GeluTanh = GeluTanhOf<24>;

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
    const float between = x * (x + 3) * (1.0f / 6), slope = fmaf(x, 1.0f / 3, 0.5f);
    return {x <= -3 ? 0 : x >= 3 ? x : between, x <= -3 ? 0 : x >= 3 ? 1 : slope};
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

// Of a slope that was kept.
struct Slope {
  static __device__ float2 of(float x) {
    return {x, x};
  }
};
