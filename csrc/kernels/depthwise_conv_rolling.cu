// Depthwise convolutions of images as in depthwise_conv_forward.cu, of a size that is known and
// with strides of 1. A thread has two channels or four, and some columns of outputs; it goes down
// the rows of the input, each of which it reads while it computes with the one before, and adds to
// the outputs of all rows that are reached from there. Compiled when the package is built
// (cmake/compile_kernels.py); depthwise_conv_cuda.cpp launches it.

#include "depthwise_conv.cuh"

#include "activation.cuh"

namespace {

template <int kWidth>
using Numbers = Piece<Type, kWidth>;

// As exact as the results, whose digits are few in half precision.
using Silu = SiluOf<Type::kDigits>;
using GeluTanh = GeluTanhOf<Type::kDigits>;

// Outputs side by side, or sums that become them.
template <int kWidth>
using Sums = float[kTileColumns][kWidth];

// Here the compiler has to have computed this, and what depends on it only from here on: else it
// would keep in registers what takes one instruction to compute.
__device__ inline void settle(unsigned& value) {
  asm volatile("" : "+r"(value));
}
__device__ inline void settle(float& value) {
  unsigned bits = __float_as_uint(value);
  settle(bits);
  value = __uint_as_float(bits);
}

// Where a thread's channels of some pixels side by side are, and which of those exist.
template <int kWidth>
struct Segment {
  unsigned step, exists;  // in bytes, from one to the next; a bit for each

  // Counts them from column `left` on, of a row of so many.
  __device__ Segment(const Place& place, int left, int width, int count)
      : step(place.pieces * (unsigned)sizeof(Words<kWidth>)), exists(0) {
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

// Pixels of a row, as memory has them.
template <int kCount, int kWidth>
struct Pixels {
  using Pixel = Words<kWidth>;
  Pixel pixels[kCount];

  __device__ void load(const char* row, const Segment<kWidth>& segment) {
    segment.template for_each<kCount>(
        row, [&](int i, const char* at) { pixels[i] = *(const Pixel*)at; });
  }
  __device__ void read(float (&values)[kCount][kWidth]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) ((const Numbers<kWidth>&)pixels[i]).read(values[i]);
  }
};

// A row of the input, as far as it serves a row of outputs. The one after it is on its way.
template <int kSize, int kWidth>
struct InputRow {
  static constexpr int kCount = kTileColumns + kSize - 1;
  float values[kCount][kWidth];
  Pixels<kCount, kWidth> next = {};  // zeros where there are never any pixels

  __device__ void advance() {
    next.read(values);
    // Before `next` is loaded again: there are registers for one of them, and for the values.
#pragma unroll
    for (int i = 0; i < kCount * kWidth; ++i) settle(values[i / kWidth][i % kWidth]);
  }
  // For a row that there is none of. It is what hardly ever happens, and no choice for each value.
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kCount * kWidth; ++i) {
      values[i / kWidth][i % kWidth] = 0;
      settle(values[i / kWidth][i % kWidth]);
    }
  }
  // What it adds to outputs that it meets with one row of the taps.
  __device__ void add_to(Sums<kWidth>& sums, const Taps<kSize * kSize, kWidth>& taps,
                         int row) const {
#pragma unroll
    for (int t = 0; t < kSize; ++t) {
      const auto weight = taps[row * kSize + t];
#pragma unroll
      for (int x = 0; x < kTileColumns; ++x) add_product(sums[x], weight.channels, values[x + t]);
    }
  }
};

template <class Activation, int kWidth>
__device__ void activate(Sums<kWidth>& sums) {
#pragma unroll
  for (int i = 0; i < kTileColumns * kWidth; ++i) {
    float& sum = sums[i / kWidth][i % kWidth];
    sum = Activation::of(sum).x;
  }
}

template <int kWidth>
__device__ void store(void* data, long long row, const Segment<kWidth>& segment,
                      const Sums<kWidth>& sums) {
  segment.template for_each<kTileColumns>((char*)data + row, [&](int x, char* at) {
    *(Numbers<kWidth>*)at = Numbers<kWidth>::of(sums[x]);
  });
}

// Writes outputs whose sums are complete.
template <int kWidth>
__device__ void finish(const DepthwiseConvCall& call, long long row, const Segment<kWidth>& segment,
                       Sums<kWidth>& sums) {
  const bool is_bare = call.before == nullptr && call.activation == kNone;
  if (is_bare) return store(call.out, row, segment, sums);
  if (call.before != nullptr) store(call.before, row, segment, sums);
  switch (call.activation) {
#define CASE(name, Name) \
  case k##Name: activate<Name, kWidth>(sums); break;
    CUDNN_OPS_ACTIVATIONS(CASE)
#undef CASE
  }
  store(call.out, row, segment, sums);
}

template <int kSize, int kWidth>
__device__ void forward(const DepthwiseConvCall& call) {
  const auto& shape = call.shape;
  const Place place(shape, kWidth, blockIdx.x);
  const Taps<kSize * kSize, kWidth> taps(call, place);
  if (place.piece >= place.pieces) return;
  float bias[kWidth] = {};
  if (call.bias != nullptr) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      bias[k] = Type::read(((const Bits*)call.bias)[place.piece * kWidth + k]);
    }
  }
  const int height = shape.size[1], width = shape.size[2];
  const int out_height = shape.out_size[1], out_width = shape.out_size[2];
  for_tiles(shape, place, [&](long long image, int down, int across) {
    const int start = down * shape.stretch, column = across * kTileColumns;
    const int rows = min(shape.stretch, out_height - start);
    // Their inputs are in the rows from `top` to before `end`, of which some need not exist.
    const int top = start - shape.padding[1], left = column - shape.padding[2];
    const unsigned end = max(min(height, top + rows + kSize - 1), 0);
    const Segment<kWidth> ins(place, left, width, InputRow<kSize, kWidth>::kCount);
    const Segment<kWidth> outs(place, column, out_width, kTileColumns);
    const long long line = (long long)width * ins.step, out_line = (long long)out_width * ins.step;
    const int first = place.piece * sizeof(Words<kWidth>);
    const auto* in = (const char*)call.input + (image * height + top) * line +
                     (long long)left * ins.step + first;
    // Of the outputs, where the row is that is complete next, and the one that is begun next.
    long long done = (image * out_height + start) * out_line + (long long)column * ins.step + first;
    long long begun = done;
    InputRow<kSize, kWidth> input;
    if ((unsigned)top < end) input.next.load(in, ins);
    // Sums of the rows of outputs that some inputs have been added to, and some have not.
    Sums<kWidth> open[kSize - 1] = {};
#pragma unroll 1
    for (int i = 0; i < rows + kSize - 1; ++i) {
      const bool is_there = (unsigned)(top + i) < end;
      input.advance();
      if (!kSkipsRows<kSize> && !is_there) input.clear();
      in += line;
      if ((unsigned)(top + i + 1) < end) input.next.load(in, ins);
      const bool has_residual = call.residual != nullptr && i < rows;
      Pixels<kTileColumns, kWidth> residual;
      // It is the last of the inputs of the first of these rows, and the first one's of the last.
      // Whatever is added to sums moves them up, to where they are for the next row.
#pragma unroll
      for (int y = 0; y < kSize; ++y) {
        const int tap = kSize - 1 - y;
        Sums<kWidth> sums;
#pragma unroll
        for (int x = 0; x < kTileColumns; ++x) {
#pragma unroll
          for (int k = 0; k < kWidth; ++k) sums[x][k] = y < kSize - 1 ? open[y][x][k] : bias[k];
        }
        if (!kSkipsRows<kSize> || (is_there && (unsigned)(i - tap) < (unsigned)rows)) {
          input.add_to(sums, taps, tap);
        } else {
          // Moves them by an instruction of its own: mere copies would be made before the branch,
          // for either side.
#pragma unroll
          for (int x = 0; x < kTileColumns; ++x) {
#pragma unroll
            for (int k = 0; k < kWidth; ++k) sums[x][k] += 0.0f;
          }
        }
        if (y == 0) {
          if (i >= kSize - 1) {
            finish(call, done, outs, sums);
            done += out_line;
          }
          if (has_residual) {
            residual.load((const char*)call.residual + begun, outs);
            begun += out_line;
          }
          continue;
        }
        if (y == kSize - 1 && has_residual) {
#pragma unroll
          for (int x = 0; x < kTileColumns; ++x) {
            ((const Numbers<kWidth>&)residual.pixels[x]).add_to(sums[x]);
          }
        }
#pragma unroll
        for (int x = 0; x < kTileColumns; ++x) {
#pragma unroll
          for (int k = 0; k < kWidth; ++k) open[y - 1][x][k] = sums[x][k];
        }
      }
    }
  });
}

}  // namespace

// A multiprocessor's blocks are as many as have registers for all of this.
constexpr int kAtOnce = sizeof(Bits) == 2 ? 6 : 5;
#define ROLLING(name, size, width, blocks)                                  \
  DEPTHWISE_CONV(rolling_##name, DepthwiseConvCall, (forward<size, width>), \
                 (kRollingThreads, blocks))
ROLLING(3, 3, kPair, kAtOnce - 1)
ROLLING(5, 5, kPair, kAtOnce - 2)
ROLLING(7, 7, kPair, kAtOnce - 3)

// With few taps much of the work is to find out where numbers are: more channels share it. In
// single precision there are no registers for that.
#define IS_HALF_Half 1
#define IS_HALF_BFloat16 1
#define IS_HALF_Float 0
#define JOIN(prefix, type) prefix##type
#define IS_HALF(type) JOIN(IS_HALF_, type)
#if IS_HALF(KERNEL_TYPE)
ROLLING(3_wide, 3, kWide, 3)
#endif
