// What comes after a depthwise convolution of images, for the outputs that a thread has.
#pragma once

#include "depthwise_conv.cuh"

#include "activation.cuh"

// A thread's outputs, row by row of the tile.
template <int kRows, int kColumns, int kWidth>
struct Outputs {
  float sums[kRows][kColumns][kWidth] = {};

  // What comes after the convolution, for the outputs that exist. `index` is where the first is, in
  // pieces, and `down` and `across` lead to the next ones.
  __device__ void finish(const DepthwiseConvCall& call, const Place& place, long long index,
                         long long down, int rows, int columns) {
    float bias[kWidth] = {};
    if (call.bias != nullptr) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        bias[k] = Type::read(((const Bits*)call.bias)[place.piece * kWidth + k]);
      }
    }
    if (call.activation == kNone && call.residual == nullptr && call.before == nullptr) {
#pragma unroll
      for (int y = 0; y < kRows; ++y) {
#pragma unroll
        for (int x = 0; x < kColumns; ++x) {
          if (y >= rows || x >= columns) continue;
#pragma unroll
          for (int k = 0; k < kWidth; ++k) sums[y][x][k] += bias[k];
          write(call.out, index + y * down + (long long)x * place.pieces, sums[y][x]);
        }
      }
      return;
    }
    // One after another, from memory: once unrolled, the code of all activations is a long one.
    float kept[kRows * kColumns][kWidth];
#pragma unroll
    for (int i = 0; i < kRows * kColumns; ++i) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) kept[i][k] = sums[i / kColumns][i % kColumns][k] + bias[k];
    }
    switch (call.activation) {
#define CASE(name, Name) \
  case k##Name: return finish_all<Name>(call, place, index, down, rows, columns, kept);
      CUDNN_OPS_ACTIVATIONS(CASE)
#undef CASE
    }
  }

 private:
  using Vector = Piece<Type, kWidth>;

  static __device__ void write(void* data, long long index, const float (&values)[kWidth]) {
    ((Vector*)data)[index] = Vector::of(values);
  }
  template <class Activation>
  static __device__ void finish_all(const DepthwiseConvCall& call, const Place& place,
                                    long long index, long long down, int rows, int columns,
                                    float (&kept)[kRows * kColumns][kWidth]) {
    for (int y = 0; y < min(rows, kRows); ++y) {
#pragma unroll 1
      for (int x = 0; x < min(columns, kColumns); ++x) {
        const long long at = index + y * down + (long long)x * place.pieces;
        float (&values)[kWidth] = kept[y * kColumns + x];
        if (call.residual != nullptr) ((const Vector*)call.residual)[at].add_to(values);
        if (call.before != nullptr) write(call.before, at, values);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) values[k] = Activation::of(values[k]).x;
        write(call.out, at, values);
      }
    }
  }
};
