// Depthwise convolutions of images as in depthwise_conv_forward.cu, of a size that is known and
// with strides of 1. A thread has two channels, and some columns of outputs; it goes down the rows
// of the input, each of which it reads while it computes with the one before, and adds to the
// outputs of all rows that are reached from there. Compiled when the package is built
// (cmake/compile_kernels.py); depthwise_conv_cuda.cpp launches it.

#include "depthwise_conv.cuh"

#include "activation.cuh"

namespace {

using Pixel = PairOf<Bits>;
using Numbers = Piece<Type, kPair>;

// As exact as the results, whose digits are few in half precision.
using Silu = SiluOf<Type::kDigits>;
using GeluTanh = GeluTanhOf<Type::kDigits>;

// Outputs side by side, or sums that become them.
using Sums = float[kTileColumns][kPair];

// Here the compiler has to have computed this, and what depends on it only from here on: else it
// would keep in registers what takes one instruction to compute.
__device__ inline void settle(unsigned& value) {
  asm volatile("" : "+r"(value));
}

// Where a thread's channels of some pixels side by side are, and which of those exist.
struct Segment {
  unsigned step, exists;  // in bytes, from one to the next; a bit for each

  // Counts them from column `left` on, of a row of so many.
  __device__ Segment(const Place& place, int left, int width, int count)
      : step(place.pieces * (unsigned)sizeof(Pixel)), exists(0) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if ((unsigned)(left + i) < (unsigned)width) exists |= 1u << i;
    }
    settle(exists);
  }
  // Calls each(i, at) for those that exist, the first of which is, or would be, at `first`.
  template <int kCount, class Byte, class Each>
  __device__ void for_each(Byte* first, const Each& each) const {
    unsigned found = exists;
    settle(found);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (found & 1u << i) each(i, first);
      unsigned across = step;
      settle(across);
      first += across;
    }
  }
};

// Pixels of a row of the input, as memory has them: zeros where there are none.
template <int kCount>
struct Pixels {
  Pixel pixels[kCount] = {};

  __device__ void load(const char* row, const Segment& segment) {
    segment.for_each<kCount>(row, [&](int i, const char* at) { pixels[i] = *(const Pixel*)at; });
  }
  __device__ void read(float (&values)[kCount][kPair]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      ((const Numbers&)pixels[i]).read(values[i]);
#pragma unroll
      for (int k = 0; k < kPair; ++k) {
        unsigned bits = __float_as_uint(values[i][k]);
        settle(bits);
        values[i][k] = __uint_as_float(bits);
      }
    }
  }
};

template <class Activation>
__device__ void activate(Sums& sums) {
#pragma unroll
  for (int x = 0; x < kTileColumns; ++x) {
#pragma unroll
    for (int k = 0; k < kPair; ++k) sums[x][k] = Activation::of(sums[x][k]).x;
  }
}

__device__ void store(char* row, const Segment& segment, const Sums& sums) {
  segment.for_each<kTileColumns>(row,
                                 [&](int x, char* at) { *(Numbers*)at = Numbers::of(sums[x]); });
}

template <int kSize>
__device__ void forward(const DepthwiseConvCall& call) {
  constexpr int kCount = kTileColumns + kSize - 1;
  const auto& shape = call.shape;
  const Place place(shape, kPair, blockIdx.x);
  const Taps<kSize * kSize> taps(call, place);
  if (place.piece >= place.pieces) return;
  float bias[kPair] = {};
  if (call.bias != nullptr) {
#pragma unroll
    for (int k = 0; k < kPair; ++k) {
      bias[k] = Type::read(((const Bits*)call.bias)[place.piece * kPair + k]);
    }
  }
  const int height = shape.size[1], width = shape.size[2];
  const int out_height = shape.out_size[1], out_width = shape.out_size[2];
  for_tiles(shape, place, [&](long long image, int down, int across) {
    const int start = down * shape.stretch, column = across * kTileColumns;
    const int rows = min(shape.stretch, out_height - start);
    // The input's rows that these are made of are those from `top` to before `end` that exist.
    const int top = start - shape.padding[1], left = column - shape.padding[2];
    const unsigned end = max(min(height, top + rows + kSize - 1), 0);
    const Segment ins(place, left, width, kCount), outs(place, column, out_width, kTileColumns);
    const long long line = (long long)width * ins.step, out_line = (long long)out_width * ins.step;
    const auto* in = (const char*)call.input + (image * height + top) * line +
                     (long long)left * ins.step + place.piece * sizeof(Pixel);
    // Of the outputs, the place of the row that is done next, and of the one that is begun next.
    long long done = (image * out_height + start) * out_line + (long long)column * ins.step +
                     place.piece * sizeof(Pixel);
    long long begun = done;
    Pixels<kCount> next;
    if ((unsigned)top < end) next.load(in, ins);
    float open[kSize - 1][kTileColumns][kPair] = {};
#pragma unroll 1
    for (int i = 0; i < rows + kSize - 1; ++i) {
      const bool is_there = (unsigned)(top + i) < end;
      float values[kCount][kPair];
      next.read(values);
      if (!kSkipsRows<kSize> && !is_there) {
#pragma unroll
        for (int x = 0; x < kCount; ++x) {
          unsigned zero = 0;
          settle(zero);
          values[x][0] = values[x][1] = __uint_as_float(zero);
        }
      }
      in += line;
      if ((unsigned)(top + i + 1) < end) next.load(in, ins);
      Pixels<kTileColumns> residual;
      // The outputs that it adds to, from the row that is done with it to the one that it is the
      // first of. When sums have been added to, they have moved up by one row.
#pragma unroll
      for (int y = 0; y < kSize; ++y) {
        const int tap = kSize - 1 - y;
        Sums sums;
#pragma unroll
        for (int x = 0; x < kTileColumns; ++x) {
#pragma unroll
          for (int k = 0; k < kPair; ++k) sums[x][k] = y < kSize - 1 ? open[y][x][k] : bias[k];
        }
        if (!kSkipsRows<kSize> || (is_there && (unsigned)(i - tap) < (unsigned)rows)) {
#pragma unroll
          for (int t = 0; t < kSize; ++t) {
            const float2 weight = taps[tap * kSize + t];
#pragma unroll
            for (int x = 0; x < kTileColumns; ++x) add_product(sums[x], weight, values[x + t]);
          }
        } else {
          // An instruction, which moves them: what moves nothing but registers would do so before
          // the branch, for both sides.
#pragma unroll
          for (int x = 0; x < kTileColumns; ++x) {
#pragma unroll
            for (int k = 0; k < kPair; ++k) sums[x][k] += 0.0f;
          }
        }
        if (y == 0) {
          if (i >= kSize - 1) {
            if (call.before != nullptr) store((char*)call.before + done, outs, sums);
            switch (call.activation) {
#define CASE(name, Name) \
  case k##Name: activate<Name>(sums); break;
              CUDNN_OPS_ACTIVATIONS(CASE)
#undef CASE
            }
            store((char*)call.out + done, outs, sums);
            done += out_line;
          }
          if (call.residual != nullptr && i < rows) {
            residual.load((const char*)call.residual + begun, outs);
            begun += out_line;
          }
          continue;
        }
        if (y == kSize - 1 && call.residual != nullptr) {
#pragma unroll
          for (int x = 0; x < kTileColumns; ++x) {
            ((const Numbers&)residual.pixels[x]).add_to(sums[x]);
          }
        }
#pragma unroll
        for (int x = 0; x < kTileColumns; ++x) {
#pragma unroll
          for (int k = 0; k < kPair; ++k) open[y - 1][x][k] = sums[x][k];
        }
      }
    }
  });
}

}  // namespace

// A multiprocessor's blocks are as many as have registers for all of this.
constexpr int kAtOnce = sizeof(Bits) == 2 ? 6 : 5;
DEPTHWISE_CONV(rolling_3, DepthwiseConvCall, forward<3>, (kRollingThreads, kAtOnce - 1))
DEPTHWISE_CONV(rolling_5, DepthwiseConvCall, forward<5>, (kRollingThreads, kAtOnce - 2))
DEPTHWISE_CONV(rolling_7, DepthwiseConvCall, forward<7>, (kRollingThreads, kAtOnce - 3))
