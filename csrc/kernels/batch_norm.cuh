// What a batch norm does to the numbers of a channel, in every kernel the same to the last bit: the
// backward tells from the input where the ReLU of the forward let it pass.
#pragma once

#include "batch_norm_call.h"
#include "number.cuh"

template <class Type>
__device__ float read_vector(const BatchNormVector& vector, unsigned channel, float otherwise) {
  if (vector.data == nullptr) return otherwise;
  return vector.is_float ? ((const float*)vector.data)[channel]
                         : Type::read(((const typename Type::Bits*)vector.data)[channel]);
}

// Those of a piece's channels, in as few loads as there may be.
template <class Type, int kWidth>
__device__ void read_vector(const BatchNormVector& vector, unsigned first, float otherwise,
                            float (&values)[kWidth]) {
  constexpr int kFloats = kWidth < 4 ? kWidth : 4;
  const bool is_aligned = (unsigned long long)vector.data % 16 == 0;
  if (vector.data != nullptr && is_aligned && vector.is_float) {
#pragma unroll
    for (int k = 0; k < kWidth; k += kFloats) {
      float some[kFloats];
      ((const Piece<Float, kFloats>*)((const float*)vector.data + first + k))->read(some);
#pragma unroll
      for (int i = 0; i < kFloats; ++i) values[k + i] = some[i];
    }
  } else if (vector.data != nullptr && is_aligned) {
    ((const Piece<Type, kWidth>*)((const typename Type::Bits*)vector.data + first))->read(values);
  } else {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] = read_vector<Type>(vector, first + k, otherwise);
  }
}

// What is done to the numbers of a channel. The mean is subtracted first: where it is far from 0,
// one factor and one summand would lose most digits.
struct Channel {
  float mean, factor, bias;

  // Those from `first` on; `spread`: 1 / deviation, or a variance, to which `eps` is added.
  template <class Type, int kWidth>
  static __device__ void read(Channel (&channels)[kWidth], const BatchNormVector& mean,
                              const BatchNormVector& spread, const BatchNormVector& weight,
                              const BatchNormVector& bias, unsigned first, bool is_variance = false,
                              float eps = 0) {
    float means[kWidth], spreads[kWidth], weights[kWidth], biases[kWidth];
    read_vector<Type>(mean, first, 0, means);
    read_vector<Type>(spread, first, 1, spreads);
    read_vector<Type>(weight, first, 1, weights);
    read_vector<Type>(bias, first, 0, biases);
    if (is_variance) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) spreads[k] = rsqrtf(spreads[k] + eps);
    }
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      channels[k] = {means[k], spreads[k] * weights[k], biases[k]};
    }
  }
  __device__ float norm(float value) const {
    return fmaf(value - mean, factor, bias);
  }
};

// A number that is none stays that.
__device__ float relu(float value) {
  return value < 0 ? 0 : value;
}
