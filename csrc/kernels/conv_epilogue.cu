// The gradient of a convolution's epilogue: through the activation, and its sum for the bias, in
// one pass over memory. Compiled when the package is built (cmake/compile_kernels.py);
// conv_epilogue_cuda.cpp launches it.

#include "activation.cuh"
#include "column_sums.cuh"
#include "conv_epilogue_call.h"
#include "number.cuh"

// A block has some pieces of the columns, and as many rows of them at once as it has threads for;
// then every gridDim.y-th such stretch of rows.
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
      conv_epilogue_##name##_##suffix##_##width(const __grid_constant__ ConvEpilogueCall call) { \
    epilogue<Type, Activation, width>(call);                                                     \
  }

#define EPILOGUES(Type, suffix, width)          \
  EPILOGUE(none, Type, Identity, suffix, width) \
  EPILOGUE(relu, Type, Relu, suffix, width)     \
  EPILOGUE(silu, Type, Silu, suffix, width)     \
  EPILOGUE(gelu, Type, Gelu, suffix, width)     \
  EPILOGUE(gelu_tanh, Type, GeluTanh, suffix, width)

#define ADD_UP(Type, suffix)                                                         \
  extern "C" __global__ void __launch_bounds__(1024)                                 \
      conv_epilogue_add_up_##suffix(const __grid_constant__ ConvEpilogueCall call) { \
    const auto write = [&](unsigned column, float sum) {                             \
      ((Type::Bits*)call.grad_bias)[column] = Type::write(sum);                      \
    };                                                                               \
    add_up_columns(call.partial, call.partials, call.columns, write);                \
  }

EPILOGUES(Half, half, 8)
EPILOGUES(Half, half, 1)
EPILOGUES(BFloat16, bfloat16, 8)
EPILOGUES(BFloat16, bfloat16, 1)
EPILOGUES(Float, float, 4)
EPILOGUES(Float, float, 1)
ADD_UP(Half, half)
ADD_UP(BFloat16, bfloat16)
ADD_UP(Float, float)
