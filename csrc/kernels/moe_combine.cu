// The weighted sum of each token's rows, and its gradients. Compiled when the package is built
// (cmake/compile_kernels.py); moe_rows_cuda.cpp launches it.

#include "moe_rows.cuh"
#include "number.cuh"
#include "threads.cuh"

template <class Type>
__device__ float weight_at(const void* weights, bool is_float, long long pair) {
  return is_float ? ((const float*)weights)[pair]
                  : Type::read(((const typename Type::Bits*)weights)[pair]);
}

// A piece of a token's sum, a thread. Rows are added in the order of the token's experts.
template <class Type, int kWidth>
__device__ void combine(const MoeCombineCall& call) {
  using Vector = Piece<Type, kWidth>;
  constexpr unsigned kAtOnce = 4;  // so many reads are under way
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= call.pieces) return;
  const long long token = call.pieces >> 32 ? i / call.of_row : (unsigned)i / call.of_row;
  const unsigned at = i - token * call.of_row, count = call.positions.of_token;
  float sum[kWidth];
#pragma unroll
  for (int n = 0; n < kWidth; ++n) sum[n] = 0;
  for (unsigned first = 0; first < count; first += kAtOnce) {
    Vector vectors[kAtOnce];
    float weights[kAtOnce];
    bool is_there[kAtOnce];
#pragma unroll
    for (unsigned k = 0; k < kAtOnce; ++k) {
      is_there[k] = false;
      if (first + k >= count) continue;
      const long long pair = token * count + first + k;
      const RowPlace place = place_of(call.positions, pair);
      is_there[k] = place.has_expert;
      if (!place.has_expert) continue;
      const auto* row = (const typename Type::Bits*)call.rows + place.row * call.stride;
      vectors[k] = ((const Vector*)row)[at];
      weights[k] = call.weights ? weight_at<Type>(call.weights, call.is_weight_float, pair) : 1.0f;
    }
#pragma unroll
    for (unsigned k = 0; k < kAtOnce; ++k) {
      if (!is_there[k]) continue;
      float values[kWidth];
      vectors[k].read(values);
#pragma unroll
      for (int n = 0; n < kWidth; ++n) sum[n] += weights[k] * values[n];
    }
  }
  ((Vector*)call.tokens)[i] = Vector::of(sum);
}

// A pair of a token and an expert, a warp: the gradient of its row, and that of its weight.
template <class Type, int kWidth>
__device__ void combine_backward(const MoeCombineBackwardCall& call) {
  using Bits = typename Type::Bits;
  using Vector = Piece<Type, kWidth>;
  const long long pair = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (pair >= call.pairs) return;  // for all lanes
  const RowPlace place = place_of(call.positions, pair);
  const long long token = pair / call.positions.of_token;
  const float weight =
      place.has_expert ? weight_at<Type>(call.weights, call.is_weight_float, pair) : 0.0f;
  const auto* grads = (const Vector*)((const Bits*)call.grad_tokens + token * call.grad_stride);
  const auto* row = (const Vector*)((const Bits*)call.rows + place.row * call.stride);
  auto* grad_row = (Vector*)call.grad_rows + (long long)place.row * call.of_row;
  const bool writes_row = call.grad_rows && (place.has_expert || place.is_empty);
  const bool has_product = call.grad_weights && place.has_expert;
  float product = 0;
#pragma unroll 4
  for (unsigned at = threadIdx.x % 32; at < call.of_row; at += 32) {
    float grad[kWidth];
#pragma unroll
    for (int n = 0; n < kWidth; ++n) grad[n] = 0;
    if (place.has_expert) grads[at].read(grad);
    if (has_product) {
      float values[kWidth];
      row[at].read(values);
#pragma unroll
      for (int n = 0; n < kWidth; ++n) product += grad[n] * values[n];
    }
    if (writes_row) {
#pragma unroll
      for (int n = 0; n < kWidth; ++n) grad[n] *= weight;
      grad_row[at] = Vector::of(grad);
    }
  }
  if (!call.grad_weights) return;
  product = sum_within_warp(product, 32);
  if (threadIdx.x % 32 != 0) return;
  if (call.is_weight_float) {
    ((float*)call.grad_weights)[pair] = product;
  } else {
    ((Bits*)call.grad_weights)[pair] = Type::write(product);
  }
}

#define MOE_COMBINE(Type, name, width)                                                       \
  extern "C" __global__ void __launch_bounds__(256)                                          \
      moe_combine_##name##_##width(const __grid_constant__ MoeCombineCall call) {            \
    combine<Type, width>(call);                                                              \
  }                                                                                          \
  extern "C" __global__ void __launch_bounds__(256) moe_combine_##name##_##width##_backward( \
      const __grid_constant__ MoeCombineBackwardCall call) {                                 \
    combine_backward<Type, width>(call);                                                     \
  }

MOE_COMBINE(Half, half, 8)
MOE_COMBINE(Half, half, 1)
MOE_COMBINE(BFloat16, bfloat16, 8)
MOE_COMBINE(BFloat16, bfloat16, 1)
MOE_COMBINE(Float, float, 4)
MOE_COMBINE(Float, float, 1)
