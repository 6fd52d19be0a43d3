// What the kernels of depthwise convolutions of images share: which outputs a thread has, and how
// it reads pixels and taps. Sums are in float32.
#pragma once

#include "activation_list.h"
#include "depthwise_conv_call.h"
#include "number.cuh"

#define ENUMERATOR(name, Name) k##Name,
enum : int { CUDNN_OPS_ACTIVATIONS(ENUMERATOR) };
#undef ENUMERATOR

using namespace depthwise_images;
using Type = KERNEL_TYPE;
using Bits = Type::Bits;

// A thread's channels: a piece of a strip of them, for `rows` tiles of a block at once.
struct Place {
  int own, piece, pieces;  // in the block; of all; how many there are
  int row, rows;           // of the block's threads with the same channels
  long long set;           // of tiles

  __device__ Place(const DepthwiseConvShape& shape, int width, unsigned block)
      : own(threadIdx.x % shape.pieces),
        piece((int)(block % shape.strips) * shape.pieces + own),
        pieces(shape.channels / width),
        row(threadIdx.x / shape.pieces),
        rows(blockDim.x / shape.pieces),
        set(block / shape.strips) {
  }
};

// The thread's channels of one row of an image. Zeros beyond either end.
template <int kWidth>
struct Row {
  using Vector = Piece<Type, kWidth>;
  const Vector* first;
  int length, step;  // in positions; from one to the next

  __device__ Row(const void* data, long long row, int length, const Place& place)
      : first((const Vector*)data + row * length * place.pieces + place.piece),
        length(length),
        step(place.pieces) {
  }
  __device__ void read(int at, float (&values)[kWidth]) const {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] = 0;
    if ((unsigned)at < (unsigned)length) first[(long long)at * step].read(values);
  }
};

// Whether rows beyond an image are left out, or read as zeros: without a branch all of a tile's
// loads are under way at once, which counts where there are few products to each.
template <int kSize>
constexpr bool kSkipsRows = kSize > 3;

// Channels as memory has them: in words, since a zero takes one instruction to a word.
template <int kWidth>
struct alignas(kWidth * sizeof(Bits)) Words {
  unsigned words[kWidth * sizeof(Bits) / sizeof(unsigned)];
};

// Pixels side by side in the rows of one tile, of a thread's two channels. Where they are in a row,
// and which of them exist, is found out once for all rows.
template <int kCount>
struct Strip {
  using Vector = Words<kPair>;
  const Vector* first;
  long long line;  // in pieces, from one row to the next
  unsigned exists, offsets[kCount];

  // From column `left` of row 0 on, which need not exist.
  __device__ Strip(const void* data, long long image, int height, int width, int left,
                   const Place& place)
      : first((const Vector*)data + (image * height * width + left) * place.pieces + place.piece),
        line((long long)width * place.pieces),
        exists(0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if ((unsigned)(left + i) < (unsigned)width) exists |= 1u << i;
      offsets[i] = i * place.pieces * (unsigned)sizeof(Vector);
    }
  }
  // Zeros where there is nothing, as in all of a row that `is_there` says there is none of.
  __device__ void read(int row, float (&values)[kCount][kPair], bool is_there = true) const {
    const unsigned found = is_there ? exists : 0;
    const auto* start = (const char*)(first + row * line);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Vector pixel = {};
      if (found & 1u << i) pixel = *(const Vector*)(start + offsets[i]);
      ((const Piece<Type, kPair>&)pixel).read(values[i]);
    }
  }
};

// Tiles of an image, counted across, then down, then from image to image: each thread's of a
// block, in turn. `each` gets the image and where in it the tile is.
template <class Each>
__device__ void for_tiles(const DepthwiseConvShape& shape, const Place& place, const Each& each) {
  const int of_image = shape.tiles[0] * shape.tiles[1];
  const long long all = shape.batch * of_image;
  long long tile = place.set * shape.turns * place.rows + place.row;
  for (int turn = 0; turn < shape.turns && tile < all; ++turn, tile += place.rows) {
    const long long image = tile / of_image;
    const int at = (int)(tile - image * of_image), down = at / shape.tiles[1];
    each(image, down, at - down * shape.tiles[1]);
  }
}

// The block's weights as [taps][channels], in float32: two more numbers to a row spread what
// threads write over banks.
template <int kAll, int kWidth = kPair>
struct Taps {
  static constexpr int kStep = kWidth * (kMostPieces + 1);
  const float* own;

  __device__ Taps(const DepthwiseConvCall& call, const Place& place) {
    extern __shared__ float shared[];
    const auto& shape = call.shape;
    const int channel_of_block = (place.piece - place.own) * kWidth;
    const unsigned count = kAll * min(shape.pieces * kWidth, shape.channels - channel_of_block);
    own = shared + place.own * kWidth;
    const auto* weight = (const Bits*)call.weight + (long long)channel_of_block * kAll;
    const int first = call.is_turned ? (kAll - 1) * kStep : 0;
    const int step = call.is_turned ? -kStep : kStep;
    // Several are on their way at once: blocks have nothing else to do meanwhile.
    constexpr int kBatch = kAll < 25 ? kAll / 2 + 1 : 13;
    for (unsigned begin = threadIdx.x; begin < count; begin += kBatch * blockDim.x) {
      Bits found[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const unsigned i = begin + b * blockDim.x;
        if (i < count) found[b] = weight[i];
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const unsigned i = begin + b * blockDim.x;
        const int channel = i / kAll, tap = i % kAll;
        if (i < count) shared[first + tap * step + channel] = Type::read(found[b]);
      }
    }
    __syncthreads();
  }
  // Those of a thread's channels.
  struct alignas(kWidth * sizeof(float)) Own {
    float channels[kWidth];
  };
  __device__ Own operator[](int tap) const {
    return *(const Own*)(own + tap * kStep);
  }
};

template <int kWidth>
__device__ void add_product(float (&sum)[kWidth], const float (&weight)[kWidth],
                            const float (&value)[kWidth]) {
#pragma unroll
  for (int k = 0; k < kWidth; ++k) sum[k] = fmaf(weight[k], value[k], sum[k]);
}

// The bounds of a launch, in parentheses: threads of a block, and blocks of a multiprocessor.
#define DEPTHWISE_CONV(name, Call, function, bounds)                         \
  extern "C" __global__ void __launch_bounds__ bounds depthwise_conv_##name( \
      const __grid_constant__ Call call) {                                   \
    function(call);                                                          \
  }
