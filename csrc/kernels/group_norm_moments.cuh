// Mean and squared distances of numbers that are read once. For the kernels of group norms that do
// not stay in registers.
#pragma once

#include "group_norm.cuh"

// Mean, sum of the squared distances from it, and count of some numbers (Welford; Chan, Golub and
// LeVeque for two of them). Equal numbers are their own mean, exactly.
struct Moments {
  float floats[3];

  __device__ void take(const Moments& other) {
    if (other.floats[2] == 0) return;
    const float count = floats[2] + other.floats[2], distance = other.floats[0] - floats[0];
    const float share = other.floats[2] * near_reciprocal(count);
    floats[0] += distance * share;
    // In this order nothing overflows where one of the counts is 0.
    floats[1] += other.floats[1] + distance * floats[2] * (distance * share);
    floats[2] = count;
  }
};

// The moments of a thread's numbers: of its pieces as a whole, or of each of their channels.
template <int kWidth, bool kIsOfChannels>
struct PieceMoments {
  static constexpr int kChannels = kIsOfChannels ? kWidth : 1;
  float count = 0, mean[kChannels] = {}, squares[kChannels] = {};

  __device__ void take(const float (&values)[kWidth]) {
    if constexpr (kIsOfChannels) {
      count += 1;
      const float share = near_reciprocal(count);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float distance = values[k] - mean[k];
        mean[k] = fmaf(distance, share, mean[k]);
        squares[k] = fmaf(distance, values[k] - mean[k], squares[k]);
      }
    } else {
      // Halves are added up, each number by its share of the mean, so that equal numbers are their
      // own mean here too and large ones have a finite sum.
      float parts[kWidth];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) parts[k] = values[k] * (1.0f / kWidth);
#pragma unroll
      for (int half = kWidth / 2; half > 0; half /= 2) {
#pragma unroll
        for (int k = 0; k < half; ++k) parts[k] += parts[k + half];
      }
      const float center = parts[0];
      float apart = 0;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        apart = fmaf(values[k] - center, values[k] - center, apart);
      }
      Moments all = moments(0);
      all.take({center, apart, kWidth});
      mean[0] = all.floats[0];
      squares[0] = all.floats[1];
      count = all.floats[2];
    }
  }
  __device__ Moments moments(int k) const {
    return {mean[k], squares[k], count};
  }
};
