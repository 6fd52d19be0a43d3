// Whole images in a block's shared memory, for kernels of depthwise convolutions.
#pragma once

#include "depthwise_conv.cuh"

#include "async_copy.cuh"

// The block's channels of some rows of images, each of kPixels.
template <int kPixels>
struct WholeImages {
  using Vector = Words<kPair>;
  Vector* images;
  int spread, line;  // in pieces; from one row to the next
  const DepthwiseConvShape& shape;
  const Place& place;

  // With so many pieces behind each row, which spread rows over banks.
  __device__ WholeImages(const DepthwiseConvShape& shape, const Place& place, int spread,
                         void* memory = nullptr)
      : images((Vector*)memory),
        spread(spread),
        line(kPixels * shape.pieces + spread),
        shape(shape),
        place(place) {
  }
  // Sends for `rows` rows, from that one on; all threads come here.
  __device__ void load(const void* data, long long row, int rows) const {
    const auto* from = (const Vector*)data + row * kPixels * place.pieces;
    for_each(rows, [&](int pixel, int piece, Vector* to) {
      copy_async<kChunk>(to, from + (long long)pixel * place.pieces + piece);
    });
  }
  // The same of a part of an image of so many rows and columns, with zeros in the place of the
  // pixels that there are none of.
  __device__ void load_part(const void* data, long long image, const int (&size)[3], int top,
                            int left, int rows) const {
    const int height = size[1], width = size[2];
    const auto* from = (const Vector*)data + image * height * width * place.pieces;
    for_each(rows, [&](int pixel, int piece, Vector* to) {
      const int own = pixel / kPixels, row = top + own, column = left + pixel - own * kPixels;
      const bool is_there = (unsigned)row < (unsigned)height && (unsigned)column < (unsigned)width;
      const int at = is_there ? row * width + column : 0;
      copy_async<kChunk>(to, from + (long long)at * place.pieces + piece, is_there ? kChunk : 0);
    });
  }
  // The thread's channels of a row.
  __device__ void read(int row, float (&values)[kPixels][kPair]) const {
    const Vector* pixels = images + row * line + place.own;
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      ((const Piece<Type, kPair>&)pixels[i * shape.pieces]).read(values[i]);
    }
  }

 private:
  static constexpr int kChunk = 16;

  // Calls each(pixel, piece, to) for the vectors that the thread copies.
  template <class Each>
  __device__ void for_each(int rows, const Each& each) const {
    constexpr int kPieces = kChunk / sizeof(Vector);
    const int first = place.piece - place.own;
    const int chunks = min(shape.pieces, place.pieces - first) / kPieces;
    const int step = blockDim.x / chunks, begin = threadIdx.x / chunks;
    const int piece = (threadIdx.x - begin * chunks) * kPieces;
    for (int pixel = begin; begin < step && pixel < rows * kPixels; pixel += step) {
      each(pixel, first + piece, images + pixel * shape.pieces + pixel / kPixels * spread + piece);
    }
  }
};

// One of KERNEL(taps, stride, outputs) for all sizes that there are kernels of.
#define WHOLE_SIZES(KERNEL)     \
  WHOLE_SIZES_OF(KERNEL, 1, 7)  \
  WHOLE_SIZES_OF(KERNEL, 2, 7)  \
  WHOLE_SIZES_OF(KERNEL, 1, 14) \
  WHOLE_SIZES_OF(KERNEL, 2, 14)
#define WHOLE_SIZES_OF(KERNEL, stride, outputs) \
  KERNEL(3, stride, outputs)                    \
  KERNEL(5, stride, outputs)                    \
  KERNEL(7, stride, outputs)
