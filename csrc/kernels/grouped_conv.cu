// Convolutions of images in groups, with what follows them: activation(conv + bias + residual).
// A block multiplies the pixels that it has, one tap after another, by a group's weights on tensor
// cores; what comes next is on its way to shared memory meanwhile. Compiled when the package is
// built (cmake/compile_kernels.py); grouped_conv_cuda.cpp launches them.

#include "activation.cuh"
#include "activation_list.h"
#include "grouped_conv_call.h"
#include "mma.cuh"
#include "number.cuh"

enum class Activation : int {
#define NAME(name, Name) k##Name,
  CUDNN_OPS_ACTIVATIONS(NAME)
#undef NAME
};

// Where an output pixel begins to read: the first row of its image among all rows, and the row and
// the column of its first tap in the image. And which one it is of the output's.
struct Place {
  int image, row, column;
  long long pixel;
};

constexpr int kPixels = kGroupedConvPixels, kOutputs = kGroupedConvOutputs;
constexpr int kThreads = kGroupedConvThreads, kStages = kGroupedConvStages;
constexpr int kTilePitch = kOutputs + kGroupedConvResultGap;  // of the results, in float32

template <class Activation>
__device__ void activate(float (&values)[8]) {
#pragma unroll
  for (int k = 0; k < 8; ++k) values[k] = Activation::of(values[k]).x;
}

// All threads take the same case.
__device__ void activate(float (&values)[8], Activation activation) {
  switch (activation) {
#define CASE(name, Name) \
  case Activation::k##Name: return activate<Name>(values);
    CUDNN_OPS_ACTIVATIONS(CASE)
#undef CASE
  }
}

// kSteps: of 16 channels each, that a stage has of a group's.
template <class Type, int kSteps>
__device__ void forward(const GroupedConvCall& call) {
  using Bits = typename Type::Bits;
  using Vector = Piece<Type, 8>;
  constexpr int kChannels = 16 * kSteps, kPieces = kChannels / 8;
  constexpr int kPitch = kChannels + kGroupedConvGap;
  constexpr int kStageBits = (kPixels + kOutputs) * kPitch;
  extern __shared__ uint4 shared[];
  __shared__ Place places[kPixels];
  Bits* stages = (Bits*)shared;
  const unsigned thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const unsigned tiles = (call.out_width + kOutputs - 1) / kOutputs;
  const unsigned group = blockIdx.y / tiles, first_output = blockIdx.y % tiles * kOutputs;
  const unsigned outputs = min(call.out_width - first_output, (unsigned)kOutputs);
  const long long first_pixel = (long long)blockIdx.x * kPixels;

  {
    const long long pixel = first_pixel + thread;
    Place place{0, -(1 << 29), 0, 0};  // beyond the last one: no tap is in the image
    if (pixel < call.pixels) {
      const unsigned column = pixel % call.columns, row = pixel / call.columns % call.rows;
      const long long image = pixel / call.columns / call.rows;
      place.image = (int)image * call.in_rows;
      place.pixel =
          (image * call.all_rows + row * call.out_step[0] + call.out_first[0]) * call.all_columns +
          column * call.out_step[1] + call.out_first[1];
      place.row = (int)(row * call.stride[0]) - call.padding[0];
      place.column = (int)(column * call.stride[1]) - call.padding[1];
    }
    places[thread] = place;
  }
  __syncthreads();

  const Bits* input = (const Bits*)call.input + group * call.width;
  const unsigned taps = call.taps[0] * call.taps[1];
  const Bits* weight =
      (const Bits*)call.weight +
      ((long long)group * call.out_width + first_output) * call.all_taps * call.width;
  const unsigned chunks = (call.width + kChannels - 1) / kChannels, turns = taps * chunks;

  const auto load = [&](unsigned turn) {
    if (turn < turns) {
      Bits* pixels = stages + turn % kStages * kStageBits;
      Bits* weights = pixels + kPixels * kPitch;
      const unsigned tap = turn / chunks, first = turn % chunks * kChannels;
      const unsigned tap_row = tap / call.taps[1], tap_column = tap % call.taps[1];
      const int down = (int)tap_row * call.dilation[0], right = (int)tap_column * call.dilation[1];
      const unsigned of_all = (tap_row * call.tap_step[0] + call.tap_first[0]) * call.taps_of_row +
                              tap_column * call.tap_step[1] + call.tap_first[1];
#pragma unroll
      for (int i = 0; i < kPixels * kPieces / kThreads; ++i) {
        const unsigned at = thread + i * kThreads, pixel = at / kPieces;
        const unsigned channel = first + at % kPieces * 8;
        const Place place = places[pixel];
        const int row = place.row + down, column = place.column + right;
        const bool is_there = (unsigned)row < (unsigned)call.in_rows &&
                              (unsigned)column < (unsigned)call.in_columns && channel < call.width;
        const long long from = (long long)(place.image + row) * call.in_columns + column;
        const Bits* source = is_there ? input + from * call.channels + channel : input;
        copy_async(pixels + pixel * kPitch + at % kPieces * 8, source, is_there);
      }
#pragma unroll
      for (int i = 0; i < kOutputs * kPieces / kThreads; ++i) {
        const unsigned at = thread + i * kThreads, output = at / kPieces;
        const unsigned channel = first + at % kPieces * 8;
        const bool is_there = output < outputs && channel < call.width;
        const Bits* source =
            is_there ? weight + ((long long)output * call.all_taps + of_all) * call.width + channel
                     : weight;
        copy_async(weights + output * kPitch + at % kPieces * 8, source, is_there);
      }
    }
    end_copies();  // an empty group where nothing is left
  };

  float sums[2][kOutputs / 8][4] = {};
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) load(stage);
  for (unsigned turn = 0; turn < turns; ++turn) {
    wait_for_copies<kStages - 2>();
    __syncthreads();  // this turn's is there, and nobody reads the one that is written next
    load(turn + kStages - 1);
    const Bits* pixels = stages + turn % kStages * kStageBits + warp * 32 * kPitch;
    const Bits* weights = stages + turn % kStages * kStageBits + kPixels * kPitch;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      unsigned of_pixels[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        load_rows(of_pixels[half],
                  pixels + (half * 16 + lane % 16) * kPitch + step * 16 + lane / 16 * 8);
      }
#pragma unroll
      for (int pair = 0; pair < kOutputs / 16; ++pair) {
        if (pair * 16 >= outputs) break;
        unsigned of_weights[4];
        load_rows(of_weights, weights + (pair * 16 + lane / 16 * 8 + lane % 8) * kPitch +
                                  step * 16 + lane / 8 % 2 * 8);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          multiply_add<Type>(sums[half][2 * pair], of_pixels[half], of_weights[0], of_weights[1]);
          multiply_add<Type>(sums[half][2 * pair + 1], of_pixels[half], of_weights[2],
                             of_weights[3]);
        }
      }
    }
  }
  wait_for_copies<0>();
  __syncthreads();

  // To rows of outputs, so that memory is written in pieces of 16 bytes.
  float* tile = (float*)shared;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n < kOutputs / 8; ++n) {
      float* to = tile + (warp * 32 + half * 16 + lane / 4) * kTilePitch + n * 8 + lane % 4 * 2;
      to[0] = sums[half][n][0], to[1] = sums[half][n][1];
      to[8 * kTilePitch] = sums[half][n][2], to[8 * kTilePitch + 1] = sums[half][n][3];
    }
  }
  __syncthreads();
  const unsigned pieces = outputs / 8;
  for (unsigned i = thread; i < kPixels * pieces; i += kThreads) {
    const unsigned pixel = i / pieces, output = i % pieces * 8;
    if (first_pixel + pixel >= call.pixels) break;
    float values[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) values[k] = tile[pixel * kTilePitch + output + k];
    const unsigned channel = group * call.out_width + first_output + output;
    const long long at = (places[pixel].pixel * call.outputs + channel) / 8;
    if (call.bias != nullptr) ((const Vector*)call.bias)[channel / 8].add_to(values);
    if (call.residual != nullptr) ((const Vector*)call.residual)[at].add_to(values);
    if (call.before != nullptr) ((Vector*)call.before)[at] = Vector::of(values);
    activate(values, (Activation)call.activation);
    ((Vector*)call.out)[at] = Vector::of(values);
  }
}

#define FORWARD(Type, suffix, steps)                                                  \
  extern "C" __global__ void __launch_bounds__(kThreads)                              \
      grouped_conv_##suffix##_##steps(const __grid_constant__ GroupedConvCall call) { \
    forward<Type, steps>(call);                                                       \
  }

FORWARD(Half, half, 1)
FORWARD(Half, half, 2)
FORWARD(Half, half, 3)
FORWARD(Half, half, 4)
FORWARD(BFloat16, bfloat16, 1)
FORWARD(BFloat16, bfloat16, 2)
FORWARD(BFloat16, bfloat16, 3)
FORWARD(BFloat16, bfloat16, 4)
