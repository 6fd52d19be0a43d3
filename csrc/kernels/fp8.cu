// Rounding to numbers of 8 bits and back, and the numbers that FP8 attention reads. Compiled when
// the package is built (cmake/compile_kernels.py); fp8_cuda.cpp launches it.

#include "fp8.cuh"
#include "fp8_call.h"

// Where piece i of a group lies: in the output, and in the input.
struct Fp8Place {
  long long out, in;

  __device__ Fp8Place(const Fp8Call& call, unsigned group, long long i) : out(i) {
    if (call.groups > 1) {
      const long long turn = i / call.inner;
      out = (turn * call.groups + group) * call.inner + (i - turn * call.inner);
    }
    in = out;
    if (call.pitch != call.width) {
      const long long row = out / call.width;
      in = row * call.pitch + (out - row * call.width);
    }
  }
};

// Of the block, into its group's. Every thread must come here.
__device__ void put_largest(const Fp8Call& call, unsigned group, unsigned most) {
#pragma unroll
  for (unsigned distance = 16; distance > 0; distance /= 2) {
    const unsigned other = __shfl_xor_sync(~0u, most, distance);
    most = other > most ? other : most;
  }
  if (threadIdx.x % 32 == 0) atomicMax(call.amax + group, most);
}

template <class Type, int kWidth>
__device__ void amax(const Fp8Call& call) {
  const unsigned group = blockIdx.y;
  const long long step = (long long)gridDim.x * blockDim.x;
  unsigned most = 0;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < call.pieces; i += step) {
    float values[kWidth];
    ((const Piece<Type, kWidth>*)call.input)[Fp8Place(call, group, i).in].read(values);
    most = largest(most, values);
  }
  put_largest(call, group, most);
}

// With a scale that is known, the largest magnitude comes on the way.
template <class Type, class Fp8, int kWidth>
__device__ void cast(const Fp8Call& call) {
  const unsigned group = blockIdx.y;
  const bool is_known = call.scales != nullptr;
  float scale = is_known ? call.scales[group] : scale_of(call.amax[group], Fp8::kMost);
  if (!is_known && call.is_power) scale = power_below(scale);
  const long long step = (long long)gridDim.x * blockDim.x;
  unsigned most = 0;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < call.pieces; i += step) {
    // What the pass before read last is still in the cache.
    const Fp8Place place(call, group, is_known ? i : call.pieces - 1 - i);
    float values[kWidth];
    ((const Piece<Type, kWidth>*)call.input)[place.in].read(values);
    most = largest(most, values);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] *= scale;
    ((Fp8Piece<Fp8, kWidth>*)call.out)[place.out] = Fp8Piece<Fp8, kWidth>::of(values);
  }
  if (is_known) put_largest(call, group, most);
  if (blockIdx.x == 0 && threadIdx.x == 0) call.descales[group] = 1 / scale;
}

template <class Fp8, class Type, int kWidth>
__device__ void uncast(const Fp8Call& call) {
  const unsigned group = blockIdx.y;
  const float scale = call.scales[group];
  if (call.amax != nullptr && blockIdx.x == 0 && group == 0 && threadIdx.x == 0) {
    *(float*)call.amax *= scale;
  }
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < call.pieces; i += step) {
    const Fp8Place place(call, group, i);
    // A copy is loaded at once; numbers of 8 bits that are read where they lie, one by one.
    const Fp8Piece<Fp8, kWidth> piece = ((const Fp8Piece<Fp8, kWidth>*)call.input)[place.in];
    float values[kWidth];
    piece.read(values);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] *= scale;
    ((Piece<Type, kWidth>*)call.out)[place.out] = Piece<Type, kWidth>::of(values);
  }
}

// One block. A sequence without keys is told to have one, and no queries: cuDNN's kernel for
// Hopper does not end where a tile of queries has no key.
extern "C" __global__ void __launch_bounds__(256)
    fp8_numbers(const __grid_constant__ Fp8NumbersCall call) {
  if (threadIdx.x == 0) {
    const float descale_value = call.descale_value == nullptr ? 1 : *call.descale_value;
    const float scale_out = !call.is_scaled || call.is_widened ? 1
                            : call.scale_out == nullptr        ? 1 / descale_value
                                                               : *call.scale_out;
    const float numbers[] = {*call.descale_query,
                             *call.descale_key,
                             call.is_widened ? 1 : descale_value,
                             1 / call.scale,
                             call.scale,
                             scale_out,
                             call.is_widened ? descale_value : 1 / scale_out};
    for (int i = 0; i < 7; ++i) call.numbers[4 * i] = numbers[i];
    *call.amax = 0;
    *call.amax_out = 0;
  }
  if (call.told == nullptr) return;
  for (int i = threadIdx.x; i < call.batch; i += blockDim.x) {
    const int keys = call.lengths_kv == nullptr ? call.keys : call.lengths_kv[i];
    const int queries = call.lengths == nullptr ? call.queries : call.lengths[i];
    const int some = queries < 0 ? 0 : queries < call.queries ? queries : call.queries;
    call.told[i] = keys > 0 ? some : 0;
    call.told_kv[i] = keys < 1 ? 1 : keys < call.keys ? keys : call.keys;
  }
}

#define FP8_KERNEL(name, body)                                                                   \
  extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ Fp8Call call) { \
    body(call);                                                                                  \
  }
#define FP8_FORMAT(Fp8, fp8, Type, name, width)                           \
  FP8_KERNEL(fp8_cast_##name##_##fp8##_##width, (cast<Type, Fp8, width>)) \
  FP8_KERNEL(fp8_uncast_##fp8##_##name##_##width, (uncast<Fp8, Type, width>))
#define FP8_KERNELS(Type, name, width)                       \
  FP8_KERNEL(fp8_amax_##name##_##width, (amax<Type, width>)) \
  FP8_FORMAT(E4M3, e4m3, Type, name, width)                  \
  FP8_FORMAT(E5M2, e5m2, Type, name, width)

FP8_KERNELS(Half, half, 1)
FP8_KERNELS(Half, half, 8)
FP8_KERNELS(BFloat16, bfloat16, 1)
FP8_KERNELS(BFloat16, bfloat16, 8)
FP8_KERNELS(Float, float, 1)
FP8_KERNELS(Float, float, 4)
