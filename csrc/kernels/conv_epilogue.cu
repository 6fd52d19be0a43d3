// The epilogue of a convolution or of a matrix product, activation(conv + bias + residual) or
// activation(conv + bias) + residual, and its gradient: through the activation, and its sum for the
// bias; each in one pass over memory. Compiled when the package is built
// (cmake/compile_kernels.py); conv_epilogue_cuda.cpp launches them.

#include "activation.cuh"
#include "activation_list.h"
#include "column_sums.cuh"
#include "conv_epilogue_call.h"
#include "number.cuh"

// A block has some pieces of the columns, and as many rows of them at once as it has threads for;
// then every gridDim.y-th such stretch of rows.
template <class Type, class Activation, int kWidth>
__device__ void forward(const ConvEpilogueForwardCall& call) {
  using Vector = Piece<Type, kWidth>;
  const unsigned row_pieces = call.columns / kWidth, rows = blockDim.x / call.pieces;
  const unsigned piece = threadIdx.x % call.pieces, first = threadIdx.x / call.pieces;
  const unsigned at = blockIdx.x * call.pieces + piece;
  if (at >= row_pieces) return;
  float bias[kWidth] = {};
  if (call.bias != nullptr) ((const Vector*)call.bias)[at].read(bias);
  const long long step = (long long)gridDim.y * rows;
#pragma unroll 4
  for (long long row = (long long)blockIdx.y * rows + first; row < call.rows; row += step) {
    const long long index = row * row_pieces + at;
    float sum[kWidth];
    ((const Vector*)call.conv)[index].read(sum);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sum[k] += bias[k];
    float residual[kWidth] = {};
    if (call.residual != nullptr) ((const Vector*)call.residual)[index].read(residual);
    if (!call.adds_last) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum[k] += residual[k];
    }
    if (call.before != nullptr) ((Vector*)call.before)[index] = Vector::of(sum);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sum[k] = Activation::of(sum[k]).x;
    if (call.adds_last) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum[k] += residual[k];
    }
    ((Vector*)call.out)[index] = Vector::of(sum);
  }
}

template <class Type, class Activation, int kWidth>
__device__ void epilogue(const ConvEpilogueCall& call) {
  using Vector = Piece<Type, kWidth>;
  extern __shared__ float shared[];  // [width][threads]
  const unsigned row_pieces = call.columns / kWidth, rows = blockDim.x / call.pieces;
  const unsigned piece = threadIdx.x % call.pieces, first = threadIdx.x / call.pieces;
  const unsigned at = blockIdx.x * call.pieces + piece;
  float sums[kWidth] = {};
  if (at < row_pieces) {
    const long long step = (long long)gridDim.y * rows;
#pragma unroll 4
    for (long long row = (long long)blockIdx.y * rows + first; row < call.rows; row += step) {
      const long long index = row * row_pieces + at;
      float grad[kWidth];
      ((const Vector*)call.grad_out)[index].read(grad);
      if (call.saved != nullptr) {
        float saved[kWidth];
        ((const Vector*)call.saved)[index].read(saved);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) grad[k] *= Activation::of(saved[k]).y;
      }
      if (call.grad != nullptr) ((Vector*)call.grad)[index] = Vector::of(grad);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sums[k] += grad[k];
    }
  }
  if (call.partial == nullptr) return;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) shared[k * blockDim.x + threadIdx.x] = sums[k];
  __syncthreads();
  for (unsigned i = threadIdx.x; i < call.pieces * kWidth; i += blockDim.x) {
    const unsigned column = blockIdx.x * call.pieces * kWidth + i;
    if (column >= call.columns) continue;
    const float* values = shared + i % kWidth * blockDim.x + i / kWidth;
    float sum = 0;
    for (unsigned row = 0; row < rows; ++row) sum += values[row * call.pieces];
    call.partial[(long long)blockIdx.y * call.columns + column] = sum;
  }
}

#define EPILOGUE(name, Type, Activation, suffix, width)                                          \
  extern "C" __global__ void __launch_bounds__(512)                                              \
      conv_epilogue_forward_##name##_##suffix##_##width(                                         \
          const __grid_constant__ ConvEpilogueForwardCall call) {                                \
    forward<Type, Activation, width>(call);                                                      \
  }                                                                                              \
  extern "C" __global__ void __launch_bounds__(512)                                              \
      conv_epilogue_##name##_##suffix##_##width(const __grid_constant__ ConvEpilogueCall call) { \
    epilogue<Type, Activation, width>(call);                                                     \
  }

#define ADD_UP(Type, suffix)                                                         \
  extern "C" __global__ void __launch_bounds__(1024)                                 \
      conv_epilogue_add_up_##suffix(const __grid_constant__ ConvEpilogueCall call) { \
    const auto write = [&](unsigned column, float sum) {                             \
      ((Type::Bits*)call.grad_bias)[column] = Type::write(sum);                      \
    };                                                                               \
    add_up_columns(call.partial, call.partials, call.columns, write);                \
  }

#define HALF_8(name, Activation) EPILOGUE(name, Half, Activation, half, 8)
#define HALF_1(name, Activation) EPILOGUE(name, Half, Activation, half, 1)
#define BFLOAT16_8(name, Activation) EPILOGUE(name, BFloat16, Activation, bfloat16, 8)
#define BFLOAT16_1(name, Activation) EPILOGUE(name, BFloat16, Activation, bfloat16, 1)
#define FLOAT_4(name, Activation) EPILOGUE(name, Float, Activation, float, 4)
#define FLOAT_1(name, Activation) EPILOGUE(name, Float, Activation, float, 1)

CUDNN_OPS_ACTIVATIONS(HALF_8)
CUDNN_OPS_ACTIVATIONS(HALF_1)
CUDNN_OPS_ACTIVATIONS(BFLOAT16_8)
CUDNN_OPS_ACTIVATIONS(BFLOAT16_1)
CUDNN_OPS_ACTIVATIONS(FLOAT_4)
CUDNN_OPS_ACTIVATIONS(FLOAT_1)
ADD_UP(Half, half)
ADD_UP(BFloat16, bfloat16)
ADD_UP(Float, float)
