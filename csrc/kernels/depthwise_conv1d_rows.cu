// Depthwise convolutions of one dimension as in depthwise_conv1d.cu, the length last in memory: a
// row is one channel of one sample. Compiled when the package is built (cmake/compile_kernels.py);
// depthwise_conv1d_cuda.cpp launches them.

#include "depthwise_conv1d.cuh"

namespace {

// One row, or none: all zeros.
template <class Type>
struct Row {
  const typename Type::Bits* first;
  int length;

  __device__ Row(const void* data, long long row, int length, bool is_there = true)
      : first((const typename Type::Bits*)data + row * length), length(is_there ? length : 0) {
  }
  // Zero beyond either end.
  __device__ float operator[](int at) const {
    return (unsigned)at < (unsigned)length ? Type::read(first[at]) : 0;
  }
};

// Where the i-th number of a part of a row lies in shared memory: one further for every run, so
// that threads that read a run apart meet in no bank.
__device__ int place(int i) {
  return i + i / kRun;
}

// Copies a part of a row there, by the threads that share the row.
template <class Type>
__device__ void stage(const Row<Type>& row, int start, int count, int lane, int lanes,
                      float* staged) {
#pragma unroll 4
  for (int i = lane; i < count; i += lanes) staged[place(i)] = row[start + i];
}

// Adds to each sum the factor times what is staged `from` on, one further for each. The window
// holds what they see; it moves on by one at each call.
template <int kCount>
__device__ void add_products(float factor, float next, float (&window)[kCount],
                             float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount - 1; ++i) window[i] = window[i + 1];
  window[kCount - 1] = next;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] += factor * window[i];
}

// `pieces` threads share a tile of as many runs of outputs of a row; a block has as many rows as it
// has threads for, and every gridDim.y-th tile. Where stride and dilation are 1 the inputs of a
// tile are staged, each thread computes a run, and the outputs are staged for the epilogue; else
// threads compute outputs that lie `pieces` apart, which have no inputs in common.
template <class Type>
__device__ void rows_forward(const DepthwiseConv1dCall& call) {
  extern __shared__ float shared[];
  const auto& shape = call.shape;
  const int lanes = shape.pieces, lane = threadIdx.x % lanes, tile = lanes * kRun;
  const long long row = (long long)blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes;
  const bool is_there = row < shape.batch * shape.channels;
  const int channel = (int)(row % shape.channels);
  const Row<Type> input(call.input, row, shape.length, is_there);
  const auto* weight = (const typename Type::Bits*)call.weight + (long long)channel * shape.taps;
  const auto tap_of = [&](int tap) {
    return Type::read(weight[call.is_turned ? shape.taps - 1 - tap : tap]);
  };
  float bias[1] = {};
  if (call.bias != nullptr) bias[0] = Type::read(((const typename Type::Bits*)call.bias)[channel]);
  float* const staged = shared + threadIdx.x / lanes * shape.staged;
  for (int start = blockIdx.y * tile; start < shape.out_length; start += gridDim.y * tile) {
    float sums[kRun][1] = {};
    if (shape.staged > 0) {
      float run[kRun] = {}, window[kRun] = {};
      stage(input, start - shape.padding, tile + shape.taps - 1, lane, lanes, staged);
      __syncthreads();
#pragma unroll
      for (int r = 1; r < kRun; ++r) window[r] = staged[place(lane * kRun + r - 1)];
#pragma unroll 8
      for (int tap = 0; tap < shape.taps; ++tap) {
        add_products(tap_of(tap), staged[place(lane * kRun + tap + kRun - 1)], window, run);
      }
      __syncthreads();
#pragma unroll
      for (int r = 0; r < kRun; ++r) staged[place(lane * kRun + r)] = run[r];
      __syncthreads();
#pragma unroll
      for (int r = 0; r < kRun; ++r) sums[r][0] = staged[place(r * lanes + lane)];
      __syncthreads();
    } else {
#pragma unroll 2
      for (int tap = 0; tap < shape.taps; ++tap) {
        const float factor = tap_of(tap);
        const int first = (start + lane) * shape.stride - shape.padding + tap * shape.dilation;
#pragma unroll
        for (int r = 0; r < kRun; ++r) {
          sums[r][0] += factor * input[first + r * lanes * shape.stride];
        }
      }
    }
    if (!is_there || start + lane >= shape.out_length) continue;
    const int count = (shape.out_length - start - lane + lanes - 1) / lanes;
    finish_run<Type, 1>(call, sums, bias, row * shape.out_length + start + lane, lanes, count);
  }
}

// A block has kTaps of a channel's taps, and of that channel's rows every gridDim.y-th set of
// tiles, as many tiles at once as it has threads for. Otherwise as rows_forward().
template <class Type>
__device__ void rows_of_weight(const DepthwiseConv1dWeightCall& call) {
  extern __shared__ float shared[];
  __shared__ float by_warp[8][kTaps];
  const auto& shape = call.shape;
  const int channel = blockIdx.x % shape.channels, tap = blockIdx.x / shape.channels * kTaps;
  const int lanes = shape.pieces, lane = threadIdx.x % lanes, at_once = blockDim.x / lanes;
  const int tile = shape.staged > 0 ? lanes * kRun : kChunk;
  const int tiles = (shape.out_length + tile - 1) / tile;  // of a row
  const long long all = shape.batch * tiles, step = (long long)gridDim.y * at_once;
  float* const inputs = shared + threadIdx.x / lanes * shape.staged;
  float* const grads = inputs + place(tile + kTaps);
  float sums[kTaps] = {};
  for (long long first = (long long)blockIdx.y * at_once; first < all; first += step) {
    const long long at = first + threadIdx.x / lanes, sample = at / tiles;
    const long long row = sample * shape.channels + channel;
    const Row<Type> input(call.input, row, shape.length, at < all);
    const Row<Type> grad_out(call.grad_out, row, shape.out_length, at < all);
    const int start = (int)(at - sample * tiles) * tile;
    if (shape.staged > 0) {
      float window[kTaps] = {};
      stage(input, start - shape.padding + tap, tile + kTaps - 1, lane, lanes, inputs);
      stage(grad_out, start, tile, lane, lanes, grads);
      __syncthreads();
#pragma unroll
      for (int t = 1; t < kTaps; ++t) window[t] = inputs[place(lane * kRun + t - 1)];
#pragma unroll
      for (int r = 0; r < kRun; ++r) {
        const float next = inputs[place(lane * kRun + r + kTaps - 1)];
        add_products(grads[place(lane * kRun + r)], next, window, sums);
      }
      __syncthreads();
    } else {
      const int end = min(start + tile, grad_out.length);
#pragma unroll 2
      for (int i = start + lane; i < end; i += lanes) {
        const float grad = grad_out[i];
        const int from = i * shape.stride - shape.padding + tap * shape.dilation;
#pragma unroll
        for (int t = 0; t < kTaps; ++t) sums[t] += grad * input[from + t * shape.dilation];
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kTaps; ++t) {
#pragma unroll
    for (int other = 16; other > 0; other /= 2) {
      sums[t] += __shfl_xor_sync(0xffffffff, sums[t], other);
    }
    if (threadIdx.x % 32 == 0) by_warp[threadIdx.x / 32][t] = sums[t];
  }
  __syncthreads();
  if (threadIdx.x >= kTaps || tap + (int)threadIdx.x >= shape.taps) return;
  float sum = 0;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += by_warp[warp][threadIdx.x];
  const long long at = (long long)channel * shape.taps + tap + threadIdx.x;
  call.partial[(long long)blockIdx.y * shape.channels * shape.taps + at] = sum;
}

}  // namespace

#define KERNELS(Type, suffix)                                    \
  KERNEL(rows_##suffix, DepthwiseConv1dCall, rows_forward<Type>) \
  KERNEL(weight_rows_##suffix, DepthwiseConv1dWeightCall, rows_of_weight<Type>)

KERNELS(Half, half)
KERNELS(BFloat16, bfloat16)
KERNELS(Float, float)
