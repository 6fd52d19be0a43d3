// SiLU of numbers side by side, for kernels that the special unit would hold up: it takes as long
// for an exponential, or a reciprocal, as others for two sums of each of its lanes. Two numbers of
// few digits have one reciprocal here: 1 / a is b * (1 / (a * b)).
#pragma once

#include "activation.cuh"

// The lesser of both; NaN if one of them is.
__device__ inline float least_of(float one, float other) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(one), "f"(other));
  return least;
}

// 2^x; 0 for what is smaller than any normal number.
__device__ inline float near_power(float x) {
  float near;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
  return near;
}

template <int kDigits>
struct SiluPairs {
  static constexpr bool kIsExact = kDigits > 11;
  // Arguments come multiplied by this: as powers of two, so that the exponential has no product of
  // its own; and as they are where results have many digits.
  static constexpr float kScale = kIsExact ? 1 : -1.44269504f;

  // Makes each number SiLU of it.
  template <int kWidth>
  static __device__ void apply(float (&values)[kWidth]) {
    if constexpr (kIsExact) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) values[k] = SiluOf<kDigits>::of(values[k]).x;
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; k += 2) {
        const Pair pair(values[k], values[k + 1]);
        values[k] = pair.powers[0] * pair.shares[0];
        values[k + 1] = pair.powers[1] * pair.shares[1];
      }
    }
  }

  // Multiplies gradients by SiLU's slopes, each over kScale.
  template <int kWidth>
  static __device__ void apply_slopes(const float (&arguments)[kWidth], float (&grads)[kWidth]) {
    if constexpr (kIsExact) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) grads[k] *= SiluOf<kDigits>::of(arguments[k]).y;
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; k += 2) {
        const Pair pair(arguments[k], arguments[k + 1]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          // With the logistic function s of x it is s * (1 + x * exp(-x) * s): right for every x,
          // as s is wrong by a part of itself and by no part of 1.
          const float along = pair.powers[i] * pair.exponentials[i];
          grads[k + i] = grads[k + i] * pair.shares[i] * fmaf(along, pair.shares[i], 1);
        }
      }
    }
  }

 private:
  // exp(-x) of two numbers, and their logistic functions over kScale.
  struct Pair {
    float powers[2], exponentials[2], shares[2];

    __device__ Pair(float one, float other) : powers{one, other} {
      // So that what both have in their reciprocal is a number that is no less than the smallest
      // normal one: SiLU of -43 is 1e-17, and from there on.
      constexpr float kMost = 62;
      float whole[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        powers[i] = least_of(powers[i], kMost);
        exponentials[i] = near_power(powers[i]);
        whole[i] = fmaf(exponentials[i], kScale, kScale);
      }
      const float both = near_reciprocal(whole[0] * whole[1]);
      shares[0] = whole[1] * both;
      shares[1] = whole[0] * both;
    }
  };
};
