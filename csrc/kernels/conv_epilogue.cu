// The epilogue of a convolution or of a matrix product, activation(conv + bias + residual) or
// activation(conv + bias) + residual, and its gradient: through the activation, and its sum for the
// bias; each in one pass over memory. Compiled when the package is built
// (cmake/compile_kernels.py); conv_epilogue_cuda.cpp launches them.

#include "activation.cuh"
#include "activation_list.h"
#include "column_sums.cuh"
#include "conv_epilogue_call.h"
#include "number.cuh"

// A thread asks memory for several pieces before it writes the first result. A compiler must not
// move a load over a store that may be to the same address; here a thread writes where it has read,
// or elsewhere, and no other reads there.
constexpr int kRowsAhead = 2;

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
  const bool adds_first = call.residual != nullptr && !call.adds_last;
  const bool adds_last = call.residual != nullptr && call.adds_last;
  const long long step = (long long)gridDim.y * rows;
  long long row = (long long)blockIdx.y * rows + first;
  for (; row < call.rows; row += kRowsAhead * step) {
    Vector conv[kRowsAhead], residual[kRowsAhead];
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      if (row + i * step >= call.rows) break;
      const long long index = (row + i * step) * row_pieces + at;
      conv[i] = ((const Vector*)call.conv)[index];
      if (call.residual != nullptr) residual[i] = ((const Vector*)call.residual)[index];
    }
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      if (row + i * step >= call.rows) break;
      const long long index = (row + i * step) * row_pieces + at;
      float sum[kWidth];
      conv[i].read(sum);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum[k] += bias[k];
      if (adds_first) residual[i].add_to(sum);
      if (call.before != nullptr && !call.keeps_slope) {
        ((Vector*)call.before)[index] = Vector::of(sum);
      }
      if (call.keeps_slope) {
        float slopes[kWidth];
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          const float2 both = Activation::of(sum[k]);
          sum[k] = both.x;
          slopes[k] = both.y;
        }
        ((Vector*)call.before)[index] = Vector::of(slopes);
      } else {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) sum[k] = Activation::of(sum[k]).x;
      }
      if (adds_last) residual[i].add_to(sum);
      ((Vector*)call.out)[index] = Vector::of(sum);
    }
  }
}

// Of nothing but the activation, to which rows and columns are one: rows of a piece each.
template <class Type, class Activation, int kWidth>
__device__ void activate(const ConvEpilogueForwardCall& call) {
  using Vector = Piece<Type, kWidth>;
  const long long step = (long long)gridDim.x * blockDim.x;
  const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  Vector conv[kConvEpilogueAhead];
#pragma unroll
  for (int i = 0; i < kConvEpilogueAhead; ++i) {
    const long long at = first + i * step;
    if (at < call.rows) conv[i] = ((const Vector*)call.conv)[at];
  }
#pragma unroll
  for (int i = 0; i < kConvEpilogueAhead; ++i) {
    const long long at = first + i * step;
    if (at >= call.rows) return;
    float values[kWidth];
    conv[i].read(values);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] = Activation::of(values[k]).x;
    ((Vector*)call.out)[at] = Vector::of(values);
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
  const long long step = (long long)gridDim.y * rows;
  long long row = at < row_pieces ? (long long)blockIdx.y * rows + first : call.rows;
  for (; row < call.rows; row += kRowsAhead * step) {
    Vector of_out[kRowsAhead], saved[kRowsAhead];
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      if (row + i * step >= call.rows) break;
      const long long index = (row + i * step) * row_pieces + at;
      of_out[i] = ((const Vector*)call.grad_out)[index];
      if (call.saved != nullptr) saved[i] = ((const Vector*)call.saved)[index];
    }
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      if (row + i * step >= call.rows) break;
      const long long index = (row + i * step) * row_pieces + at;
      float grad[kWidth];
      of_out[i].read(grad);
      if (call.saved != nullptr) {
        float values[kWidth];
        saved[i].read(values);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) grad[k] *= Activation::of(values[k]).y;
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

// Two blocks a multiprocessor: with fewer registers than that leaves, some of these would spill.
#define FORWARD(name, Type, Activation, suffix, width)            \
  extern "C" __global__ void __launch_bounds__(512, 2)            \
      conv_epilogue_forward_##name##_##suffix##_##width(          \
          const __grid_constant__ ConvEpilogueForwardCall call) { \
    if (call.pieces == 0) {                                       \
      activate<Type, Activation, width>(call);                    \
    } else {                                                      \
      forward<Type, Activation, width>(call);                     \
    }                                                             \
  }
#define BACKWARD(name, Type, Activation, suffix, width)                                          \
  extern "C" __global__ void __launch_bounds__(512, 2)                                           \
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

// Of every activation, or slope.
#define HALF_FORWARD(name, Activation)     \
  FORWARD(name, Half, Activation, half, 8) \
  FORWARD(name, Half, Activation, half, 1)
#define HALF_BACKWARD(name, Activation)     \
  BACKWARD(name, Half, Activation, half, 8) \
  BACKWARD(name, Half, Activation, half, 1)
#define BFLOAT16_FORWARD(name, Activation)         \
  FORWARD(name, BFloat16, Activation, bfloat16, 8) \
  FORWARD(name, BFloat16, Activation, bfloat16, 1)
#define BFLOAT16_BACKWARD(name, Activation)         \
  BACKWARD(name, BFloat16, Activation, bfloat16, 8) \
  BACKWARD(name, BFloat16, Activation, bfloat16, 1)
#define FLOAT_FORWARD(name, Activation)      \
  FORWARD(name, Float, Activation, float, 4) \
  FORWARD(name, Float, Activation, float, 1)
#define FLOAT_BACKWARD(name, Activation)      \
  BACKWARD(name, Float, Activation, float, 4) \
  BACKWARD(name, Float, Activation, float, 1)

CUDNN_OPS_ACTIVATIONS(HALF_FORWARD)
CUDNN_OPS_ACTIVATIONS(BFLOAT16_FORWARD)
CUDNN_OPS_ACTIVATIONS(FLOAT_FORWARD)
CUDNN_OPS_SLOPES(HALF_BACKWARD)
CUDNN_OPS_SLOPES(BFLOAT16_BACKWARD)
CUDNN_OPS_SLOPES(FLOAT_BACKWARD)
ADD_UP(Half, half)
ADD_UP(BFloat16, bfloat16)
ADD_UP(Float, float)
