// Layer norm and RMS norm of rows, and their gradients. Compiled to PTX when the package is built
// (cmake/compile_ptx.py), once for each type of the rows; norm_rows_cuda.cpp launches it.

#include "norm_rows_call.h"
#include "number.cuh"

namespace {

using Type = KERNEL_TYPE;
using Bits = Type::Bits;

// 16 bytes, what a thread loads at once.
constexpr int kWidth = 16 / sizeof(Bits);

struct alignas(16) Vector {
  Bits bits[kWidth];
};

__device__ inline const Bits* row_of(const NormRows& rows, unsigned row) {
  long long offset = row * rows.stride;
  if (rows.inner != 0) {
    const unsigned outer = row / rows.inner, index = row - outer * rows.inner;
    const unsigned outermost = outer / rows.middle, middle = outer - outermost * rows.middle;
    offset = outermost * rows.stride + middle * rows.middle_stride + index * rows.inner_stride;
  }
  return (const Bits*)rows.data + offset;
}

// A weight or bias, of the rows' type or float32.
struct Parameter {
  const void* data;
  bool is_float;
  float otherwise, shift;  // the value where there is none; what is added where there is one

  __device__ float at(unsigned column) const {
    if (data == nullptr) return otherwise;
    return (is_float ? ((const float*)data)[column] : Type::read(((const Bits*)data)[column])) +
           shift;
  }
  __device__ void read(unsigned vector, float (&values)[kWidth]) const {
    if (data == nullptr) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) values[k] = otherwise;
    } else if (is_float) {
#pragma unroll
      for (int k = 0; k < kWidth; k += 4) {
        const float4 four = ((const float4*)data)[(vector * kWidth + k) / 4];
        values[k] = four.x + shift, values[k + 1] = four.y + shift;
        values[k + 2] = four.z + shift, values[k + 3] = four.w + shift;
      }
    } else {
      const Vector bits = ((const Vector*)data)[vector];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) values[k] = Type::read(bits.bits[k]) + shift;
    }
  }
};

__device__ Parameter factor_of(const NormCall& call) {
  return {call.weight, call.is_weight_float, 1, call.zero_centered ? 1.0f : 0.0f};
}

__device__ Parameter bias_of(const NormCall& call) {
  return {call.bias, call.is_bias_float, 0, 0};
}

// The sums over the `group` threads that share a row: lanes of a warp, a power of two of them, or
// the block. Every thread of the block must come here.
__device__ float2 sum_over(float2 value, unsigned group, float2* scratch) {
  for (unsigned distance = (group < 32 ? group : 32) / 2; distance > 0; distance /= 2) {
    value.x += __shfl_xor_sync(~0u, value.x, distance);
    value.y += __shfl_xor_sync(~0u, value.y, distance);
  }
  if (group <= 32) return value;
  const unsigned lane = threadIdx.x % 32, warps = group / 32;
  if (lane == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  value = lane < warps ? scratch[lane] : float2{0, 0};
  for (unsigned distance = 16; distance > 0; distance /= 2) {
    value.x += __shfl_xor_sync(~0u, value.x, distance);
    value.y += __shfl_xor_sync(~0u, value.y, distance);
  }
  return value;
}

// A row by call.group threads, each of which keeps kVectors pieces of it in registers.
template <int kVectors>
__device__ void forward(const NormCall& call) {
  __shared__ float2 scratch[2][32];
  const unsigned group = call.group, thread = threadIdx.x % group;
  const unsigned row = blockIdx.x * (blockDim.x / group) + threadIdx.x / group;
  const unsigned vectors = call.columns / kWidth;
  const bool is_row = row < call.rows;
  Vector x[kVectors];
  float2 sums{0, 0};
  if (is_row) {
    const auto* input = (const Vector*)row_of(call.input, row);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const unsigned at = thread + v * group;
      if (at < vectors) x[v] = input[at];
    }
    if (call.residual.data != nullptr) {
      const auto* residual = (const Vector*)row_of(call.residual, row);
      auto* sum = (Vector*)call.sum + (long long)row * vectors;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const unsigned at = thread + v * group;
        if (at >= vectors) continue;
        const Vector other = residual[at];
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          x[v].bits[k] = Type::write(Type::read(x[v].bits[k]) + Type::read(other.bits[k]));
        }
        sum[at] = x[v];
      }
    }
  }
  float values[kVectors][kWidth];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      values[v][k] = is_row && thread + v * group < vectors ? Type::read(x[v].bits[k]) : 0;
      sums.x += values[v][k];
    }
  }
  const float per_column = 1.0f / call.columns;
  const float mean = call.is_layer ? sum_over(sums, group, scratch[0]).x * per_column : 0;
  sums = {0, 0};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!is_row || thread + v * group >= vectors) continue;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      sums.x += (values[v][k] - mean) * (values[v][k] - mean);
    }
  }
  const float rstd = rsqrtf(sum_over(sums, group, scratch[1]).x * per_column + call.eps);
  if (!is_row) return;
  if (thread == 0 && call.rstd != nullptr) call.rstd[row] = rstd;
  if (thread == 0 && call.mean != nullptr) call.mean[row] = mean;
  const Parameter factor = factor_of(call), bias = bias_of(call);
  auto* out = (Vector*)call.out + (long long)row * vectors;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const unsigned at = thread + v * group;
    if (at >= vectors) continue;
    float weights[kWidth], shifts[kWidth];
    factor.read(at, weights);
    bias.read(at, shifts);
    Vector y;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      y.bits[k] = Type::write((values[v][k] - mean) * rstd * weights[k] + shifts[k]);
    }
    out[at] = y;
  }
}

// Rows of any size and alignment, a block each, read three times.
__device__ void forward_any(const NormCall& call) {
  __shared__ float2 scratch[2][32];
  const unsigned row = blockIdx.x;
  const Bits* input = row_of(call.input, row);
  if (call.residual.data != nullptr) {
    const Bits* residual = row_of(call.residual, row);
    Bits* sum = (Bits*)call.sum + (long long)row * call.columns;
    for (unsigned at = threadIdx.x; at < call.columns; at += blockDim.x) {
      sum[at] = Type::write(Type::read(input[at]) + Type::read(residual[at]));
    }
    input = sum;  // each thread reads again what it wrote
  }
  float2 sums{0, 0};
  float mean = 0;
  if (call.is_layer) {
    for (unsigned at = threadIdx.x; at < call.columns; at += blockDim.x) {
      sums.x += Type::read(input[at]);
    }
    mean = sum_over(sums, blockDim.x, scratch[0]).x / call.columns;
  }
  sums = {0, 0};
  for (unsigned at = threadIdx.x; at < call.columns; at += blockDim.x) {
    const float value = Type::read(input[at]) - mean;
    sums.x += value * value;
  }
  const float rstd = rsqrtf(sum_over(sums, blockDim.x, scratch[1]).x / call.columns + call.eps);
  if (threadIdx.x == 0 && call.rstd != nullptr) call.rstd[row] = rstd;
  if (threadIdx.x == 0 && call.mean != nullptr) call.mean[row] = mean;
  const Parameter factor = factor_of(call), bias = bias_of(call);
  Bits* out = (Bits*)call.out + (long long)row * call.columns;
  for (unsigned at = threadIdx.x; at < call.columns; at += blockDim.x) {
    out[at] = Type::write((Type::read(input[at]) - mean) * rstd * factor.at(at) + bias.at(at));
  }
}

__device__ void copy_async(void* shared, const void* global) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(shared)),
      "l"(global));
}

// Rows one after the other in every block, the next ones on their way through shared memory
// meanwhile; what a thread sums up for its columns stays in its registers until the end, and is
// then one row of `partial`, which norm_columns adds up.
template <int kVectors, bool kIsLayer>
__device__ void backward(const NormCall& call) {
  constexpr int kStages = 3;
  extern __shared__ Vector pipeline[];  // [stages][input, grad_out][vectors][threads]
  __shared__ float2 scratch[2][32];
  const unsigned group = call.group, thread = threadIdx.x % group;
  const unsigned groups = blockDim.x / group, vectors = call.columns / kWidth;
  const auto slot = [&](unsigned stage, int tensor, int v) -> Vector& {
    return pipeline[((stage * 2 + tensor) * kVectors + v) * blockDim.x + threadIdx.x];
  };
  const auto load = [&](unsigned first, unsigned stage) {
    const unsigned long long row = (unsigned long long)first + threadIdx.x / group;
    if (row < call.rows) {
      const auto* input = (const Vector*)row_of(call.input, row);
      const auto* grad_out = (const Vector*)row_of(call.grad_out, row);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const unsigned at = thread + v * group;
        if (at >= vectors) continue;
        copy_async(&slot(stage, 0, v), input + at);
        copy_async(&slot(stage, 1, v), grad_out + at);
      }
    }
    asm volatile("cp.async.commit_group;");
  };
  const Parameter factor = factor_of(call);
  const float per_column = 1.0f / call.columns;
  float grad_weight[kVectors][kWidth] = {}, grad_bias[kIsLayer ? kVectors : 1][kWidth] = {};
  const unsigned long long step = gridDim.x * groups;
  unsigned long long first = blockIdx.x * groups;
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) load(first + stage * step, stage);
  for (unsigned turn = 0; first < call.rows; first += step, ++turn) {
    load(first + (kStages - 1) * step, (turn + kStages - 1) % kStages);
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
    const unsigned long long row = first + threadIdx.x / group;
    const unsigned stage = turn % kStages;
    const bool is_row = row < call.rows;
    const float rstd = is_row ? call.rstd[row] : 0;
    const float mean = kIsLayer && is_row ? call.mean[row] : 0;
    float2 sums{0, 0};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const unsigned at = thread + v * group;
      if (!is_row || at >= vectors) continue;
      const Vector x = slot(stage, 0, v), g = slot(stage, 1, v);
      float weights[kWidth];
      factor.read(at, weights);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float normed = (Type::read(x.bits[k]) - mean) * rstd;
        const float slope = Type::read(g.bits[k]);
        grad_weight[v][k] += slope * normed;
        if (kIsLayer) grad_bias[v][k] += slope;
        sums.x += slope * weights[k] * normed;
        if (kIsLayer) sums.y += slope * weights[k];
      }
    }
    sums = sum_over(sums, group, scratch[turn % 2]);
    if (!is_row) continue;
    const float along = sums.x * per_column, shift = kIsLayer ? sums.y * per_column : 0;
    const auto* more =
        call.grad_sum.data == nullptr ? nullptr : (const Vector*)row_of(call.grad_sum, row);
    auto* out = (Vector*)call.out + (long long)row * vectors;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const unsigned at = thread + v * group;
      if (at >= vectors) continue;
      const Vector x = slot(stage, 0, v), g = slot(stage, 1, v);
      float weights[kWidth];
      factor.read(at, weights);
      Vector result;
      if (more != nullptr) result = more[at];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float normed = (Type::read(x.bits[k]) - mean) * rstd;
        float value = (Type::read(g.bits[k]) * weights[k] - normed * along - shift) * rstd;
        if (more != nullptr) value += Type::read(result.bits[k]);
        result.bits[k] = Type::write(value);
      }
      out[at] = result;
    }
  }
  if (call.partial == nullptr) return;
  // The groups of a block lie one after the other in its warps: lanes that hold the same columns
  // add up, then the warps, through shared memory, in a fixed order.
  asm volatile("cp.async.wait_all;" ::: "memory");
  auto* shared = (float*)pipeline;
  const auto write = [&](float (&sums)[kVectors][kWidth], float* partial) {
    if (groups == 1) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const unsigned at = thread + v * group;
        if (at >= vectors) continue;
#pragma unroll
        for (int k = 0; k < kWidth; k += 4) {
          *(float4*)(partial + at * kWidth + k) =
              float4{sums[v][k], sums[v][k + 1], sums[v][k + 2], sums[v][k + 3]};
        }
      }
      return;
    }
    __syncthreads();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        shared[(v * kWidth + k) * blockDim.x + threadIdx.x] = sums[v][k];
      }
    }
    __syncthreads();
    for (unsigned column = threadIdx.x; column < call.columns; column += blockDim.x) {
      const unsigned at = column / kWidth, k = column % kWidth;
      const float* values = shared + (at / group * kWidth + k) * blockDim.x + at % group;
      float sum = 0;
      for (unsigned other = 0; other < groups; ++other) sum += values[other * group];
      partial[column] = sum;
    }
  };
  float* partial = call.partial + (long long)blockIdx.x * call.columns;
  write(grad_weight, partial);
  if constexpr (kIsLayer) write(grad_bias, partial + (long long)gridDim.x * call.columns);
}

// The gradient of rows of any size and alignment, a block each, read twice.
__device__ void backward_any(const NormCall& call) {
  __shared__ float2 scratch[32];
  const unsigned row = blockIdx.x;
  const Bits *input = row_of(call.input, row), *grad_out = row_of(call.grad_out, row);
  const Bits* more = call.grad_sum.data == nullptr ? nullptr : row_of(call.grad_sum, row);
  const Parameter factor = factor_of(call);
  const float rstd = call.rstd[row], mean = call.is_layer ? call.mean[row] : 0;
  float2 sums{0, 0};
  for (unsigned at = threadIdx.x; at < call.columns; at += blockDim.x) {
    const float slope = Type::read(grad_out[at]) * factor.at(at);
    sums.x += slope * (Type::read(input[at]) - mean) * rstd;
    sums.y += slope;
  }
  sums = sum_over(sums, blockDim.x, scratch);
  const float along = sums.x / call.columns, shift = call.is_layer ? sums.y / call.columns : 0;
  Bits* out = (Bits*)call.out + (long long)row * call.columns;
  for (unsigned at = threadIdx.x; at < call.columns; at += blockDim.x) {
    const float normed = (Type::read(input[at]) - mean) * rstd;
    float value = (Type::read(grad_out[at]) * factor.at(at) - normed * along - shift) * rstd;
    if (more != nullptr) value += Type::read(more[at]);
    out[at] = Type::write(value);
  }
}

// The sums over rows that backward() leaves to this where it keeps none: 32 columns and every
// gridDim.y-th of the rows a block.
__device__ void partial_any(const NormCall& call) {
  __shared__ float sums[2][32][33];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const unsigned column = blockIdx.x * 32 + lane;
  float grad_weight = 0, grad_bias = 0;
  for (unsigned long long row = blockIdx.y * warps + warp; row < call.rows;
       row += gridDim.y * warps) {
    if (column >= call.columns) continue;
    const float mean = call.is_layer ? call.mean[row] : 0;
    const float slope = Type::read(row_of(call.grad_out, row)[column]);
    grad_weight += slope * (Type::read(row_of(call.input, row)[column]) - mean) * call.rstd[row];
    grad_bias += slope;
  }
  sums[0][warp][lane] = grad_weight, sums[1][warp][lane] = grad_bias;
  __syncthreads();
  if (warp > 1 || column >= call.columns || (warp == 1 && !call.is_layer)) return;
  float sum = 0;
  for (unsigned other = 0; other < warps; ++other) sum += sums[warp][other][lane];
  call.partial[((long long)warp * gridDim.y + blockIdx.y) * call.columns + column] = sum;
}

// Adds up the rows of `partial`: 32 columns a block; of the weight, then in the blocks' second row
// of the bias.
__device__ void columns(const NormCall& call) {
  __shared__ float sums[32][33];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const unsigned column = blockIdx.x * 32 + lane;
  const float* partial = call.partial + (long long)blockIdx.y * call.partials * call.columns;
  float sum = 0;
  if (column < call.columns) {
#pragma unroll 8
    for (unsigned row = warp; row < call.partials; row += warps) {
      sum += partial[(long long)row * call.columns + column];
    }
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= call.columns) return;
  sum = 0;
  for (unsigned other = 0; other < warps; ++other) sum += sums[other][lane];
  void* out = blockIdx.y == 0 ? call.grad_weight : call.grad_bias;
  if (out == nullptr) return;
  if (blockIdx.y == 0 ? call.is_weight_float : call.is_bias_float) {
    ((float*)out)[column] = sum;
  } else {
    ((Bits*)out)[column] = Type::write(sum);
  }
}

}  // namespace

#define FORWARD(vectors, threads)                                                             \
  extern "C" __global__ void __launch_bounds__(threads) norm_##vectors(const NormCall call) { \
    forward<vectors>(call);                                                                   \
  }

#define BACKWARD(vectors, threads, blocks)                      \
  extern "C" __global__ void __launch_bounds__(threads, blocks) \
      rms_norm_backward_##vectors(const NormCall call) {        \
    backward<vectors, false>(call);                             \
  }                                                             \
  extern "C" __global__ void __launch_bounds__(threads, blocks) \
      layer_norm_backward_##vectors(const NormCall call) {      \
    backward<vectors, true>(call);                              \
  }

#ifdef KERNEL_BACKWARD
BACKWARD(1, 512, 2)
BACKWARD(2, 512, 1)
BACKWARD(4, 512, 1)
extern "C" __global__ void __launch_bounds__(512) norm_backward_any(const NormCall call) {
  backward_any(call);
}
extern "C" __global__ void __launch_bounds__(512) norm_partial_any(const NormCall call) {
  partial_any(call);
}
extern "C" __global__ void __launch_bounds__(1024) norm_columns(const NormCall call) {
  columns(call);
}
#else
FORWARD(1, 512)
FORWARD(2, 512)
FORWARD(4, 1024)
FORWARD(8, 1024)
extern "C" __global__ void __launch_bounds__(1024) norm_any(const NormCall call) {
  forward_any(call);
}
#endif
