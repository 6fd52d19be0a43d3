// The greatest number of each window of images, and its gradient. Images have their channels last;
// those that have them first are images of one channel. Compiled when the package is built
// (cmake/compile_kernels.py); max_pool_cuda.cpp launches it.
//
// A block has a few rows and columns of pixels, whose windows overlap, so that it reads most of
// what it needs once from memory and then from its own cache.

#include "max_pool_call.h"
#include "number.cuh"
#include "threads.cuh"

using max_pool_images::kThreads;

// A byte for each number of a piece.
template <int kWidth>
struct alignas(kWidth) Bytes {
  unsigned char values[kWidth];

  static __device__ Bytes at(const void* memory, long long place) {
    const Bytes* there = (const Bytes*)memory + place;
    if constexpr (kWidth == 1) {
      return *there;
    } else {
      return load_whole(there);
    }
  }
};

// A thread's piece of a pixel, in an image as tall and as wide as the work is.
struct Place {
  long long sample;
  int row, column, piece;

  static __device__ Place of(const MaxPoolShape& shape) {
    unsigned block = blockIdx.x;
    const unsigned strip = block % shape.strips;
    block /= shape.strips;
    const unsigned across = block % shape.across;
    block /= shape.across;
    const unsigned down = block % shape.down;
    const unsigned pixel = threadIdx.x / shape.block_pieces;
    const unsigned rows = (blockDim.x / shape.block_pieces) >> shape.log2_columns;
    return {block / shape.down, (int)(down * rows + (pixel >> shape.log2_columns)),
            (int)((across << shape.log2_columns) + (pixel & ((1u << shape.log2_columns) - 1))),
            (int)(strip * shape.block_pieces + threadIdx.x % shape.block_pieces)};
  }
};

// Where a piece of an image is, in pieces.
__device__ long long place_in(const int (&size)[2], int pieces, long long sample, int row,
                              int column, int piece) {
  return ((sample * size[0] + row) * size[1] + column) * pieces + piece;
}

// The greatest numbers so far, and their offsets in the window.
template <class Type, int kWidth>
struct Greatest {
  float values[kWidth];
  int offsets[kWidth];

  // The first number of a window, as what is less than all others but is somewhere.
  __device__ explicit Greatest(int first) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      values[k] = __uint_as_float(0xff800000);  // minus infinity
      offsets[k] = first;
    }
  }
  __device__ void take(const Piece<Type, kWidth>& piece, int offset) {
    float others[kWidth];
    piece.read(others);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      // NaN is greater than all before it, as in torch.
      const bool is_greater = others[k] > values[k] || others[k] != others[k];
      values[k] = is_greater ? others[k] : values[k];
      offsets[k] = is_greater ? offset : offsets[k];
    }
  }
};

// Where the first tap of a window is that is not in the padding.
__device__ int first_tap(int start, int dilation) {
  int tap = 0;
  for (; start < 0; start += dilation) ++tap;
  return tap;
}

// kKernel: rows and columns of a window, with a stride of 2; 0: any.
template <class Type, int kWidth, int kKernel>
__device__ void pool(const MaxPoolCall& call) {
  using Vector = Piece<Type, kWidth>;
  const MaxPoolShape& shape = call.shape;
  const auto& [kernel, stride, padding, dilation] = shape.geometry;
  const auto [sample, row, column, piece] = Place::of(shape);
  if (piece >= shape.pieces || row >= shape.out_size[0] || column >= shape.out_size[1]) return;
  const int height = shape.size[0], width = shape.size[1];
  const Vector* image = (const Vector*)call.input + sample * height * width * shape.pieces + piece;
  const auto at = [&](int y, int x) { return image + ((long long)y * width + x) * shape.pieces; };
  const int top = row * (kKernel ? 2 : stride[0]) - padding[0];
  const int left = column * (kKernel ? 2 : stride[1]) - padding[1];
  const int kernel_width = kKernel ? kKernel : kernel[1];
  const int steps[2] = {kKernel ? 1 : dilation[0], kKernel ? 1 : dilation[1]};
  Greatest<Type, kWidth> greatest(first_tap(top, steps[0]) * kernel_width +
                                  first_tap(left, steps[1]));
  if constexpr (kKernel > 0) {
    // All are asked for before the first is used.
    Vector taps[kKernel * kKernel];
    bool is_there[kKernel * kKernel];
#pragma unroll
    for (int r = 0; r < kKernel; ++r) {
#pragma unroll
      for (int c = 0; c < kKernel; ++c) {
        const int y = top + r, x = left + c, tap = r * kKernel + c;
        is_there[tap] = (unsigned)y < (unsigned)height && (unsigned)x < (unsigned)width;
        if (is_there[tap]) taps[tap] = load_whole(at(y, x));
      }
    }
#pragma unroll
    for (int tap = 0; tap < kKernel * kKernel; ++tap) {
      if (is_there[tap]) greatest.take(taps[tap], tap);
    }
  } else {
    for (int r = 0, y = top; r < kernel[0]; ++r, y += dilation[0]) {
      if ((unsigned)y >= (unsigned)height) continue;
      for (int c = 0, x = left; c < kernel_width; ++c, x += dilation[1]) {
        if ((unsigned)x < (unsigned)width) greatest.take(*at(y, x), r * kernel_width + c);
      }
    }
  }
  const long long place = place_in(shape.out_size, shape.pieces, sample, row, column, piece);
  ((Vector*)call.out)[place] = Vector::of(greatest.values);
  if (call.offsets == nullptr) return;
  Bytes<kWidth> offsets;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) offsets.values[k] = (unsigned char)greatest.offsets[k];
  ((Bytes<kWidth>*)call.offsets)[place] = offsets;
}

// A window's gradients, and where in it they go.
template <class Type, int kWidth>
struct Window {
  using Vector = Piece<Type, kWidth>;

  Vector grad, more;
  Bytes<kWidth> offsets;

  __device__ void load(const MaxPoolBackwardCall& call, long long place) {
    offsets = Bytes<kWidth>::at(call.offsets, place);
    grad = load_whole((const Vector*)call.grad_out + place);
    if (call.more != nullptr) more = load_whole((const Vector*)call.more + place);
  }
  __device__ void read(const MaxPoolBackwardCall& call, float (&grads)[kWidth]) const {
    grad.read(grads);
    if (call.more != nullptr) more.add_to(grads);
  }
  // To the sums of an input that is at this offset.
  __device__ void add(const float (&grads)[kWidth], int offset, float (&sums)[kWidth]) const {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      if (offsets.values[k] == offset) sums[k] += grads[k];
    }
  }
};

// With a stride of 2: a thread has a pair of rows and of columns, which are in few windows alike.
// The pair that begins 2 * i numbers behind the first padding is in window i and those before it.
template <class Type, int kWidth, int kKernel>
__device__ void spread_to_pairs(const MaxPoolBackwardCall& call) {
  using Vector = Piece<Type, kWidth>;
  constexpr int kWindows = (kKernel + 1) / 2;
  const MaxPoolShape& shape = call.shape;
  const auto [sample, row, column, piece] = Place::of(shape);
  const int down = row + call.first[0], across = column + call.first[1];
  const int top = 2 * down - shape.geometry.padding[0];
  const int left = 2 * across - shape.geometry.padding[1];
  if (piece >= shape.pieces || top >= shape.size[0] || left >= shape.size[1]) return;
  // All are asked for before the first is used; from the first window to the last.
  Window<Type, kWidth> windows[kWindows][kWindows];
  bool is_there[kWindows][kWindows];
#pragma unroll
  for (int i = 0; i < kWindows; ++i) {
#pragma unroll
    for (int j = 0; j < kWindows; ++j) {
      const int y = down - (kWindows - 1 - i), x = across - (kWindows - 1 - j);
      is_there[i][j] =
          (unsigned)y < (unsigned)shape.out_size[0] && (unsigned)x < (unsigned)shape.out_size[1];
      if (!is_there[i][j]) continue;
      windows[i][j].load(call, place_in(shape.out_size, shape.pieces, sample, y, x, piece));
    }
  }
  float sums[2][2][kWidth] = {};
#pragma unroll
  for (int i = 0; i < kWindows; ++i) {
#pragma unroll
    for (int j = 0; j < kWindows; ++j) {
      if (!is_there[i][j]) continue;
      float grads[kWidth];
      windows[i][j].read(call, grads);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int y = r + 2 * (kWindows - 1 - i), x = c + 2 * (kWindows - 1 - j);
          if (y < kKernel && x < kKernel) windows[i][j].add(grads, y * kKernel + x, sums[r][c]);
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int y = top + r, x = left + c;
      if ((unsigned)y >= (unsigned)shape.size[0] || (unsigned)x >= (unsigned)shape.size[1]) {
        continue;
      }
      ((Vector*)call.grad_input)[place_in(shape.size, shape.pieces, sample, y, x, piece)] =
          Vector::of(sums[r][c]);
    }
  }
}

// The windows that reach over an input along a dimension, from the first to the last; where in a
// window the input is: at a tap, or so much behind one. Divided once: each step goes on from there.
struct Reach {
  int window, last, tap, rest;

  static __device__ Reach of(const MaxPoolShape& shape, int dim, int input) {
    const auto& [kernel, stride, padding, dilation] = shape.geometry;
    const int behind = input + padding[dim];
    const int before = behind - (kernel[dim] - 1) * dilation[dim];
    const int first = before > 0 ? (before + stride[dim] - 1) / stride[dim] : 0;
    const int last = min(behind / stride[dim], shape.out_size[dim] - 1);
    const int distance = max(behind - first * stride[dim], 0);
    const int tap = distance / dilation[dim];
    return {first, last, tap, distance - tap * dilation[dim]};
  }
  __device__ void go_on(const MaxPoolBackwardCall& call, int dim) {
    ++window;
    tap -= call.taps[dim];
    rest -= call.rest[dim];
    if (rest < 0) rest += call.shape.geometry.dilation[dim], --tap;
  }
};

template <class Type, int kWidth>
__device__ void spread_to_each(const MaxPoolBackwardCall& call) {
  using Vector = Piece<Type, kWidth>;
  const MaxPoolShape& shape = call.shape;
  const auto [sample, row, column, piece] = Place::of(shape);
  if (piece >= shape.pieces || row >= shape.size[0] || column >= shape.size[1]) return;
  float sums[kWidth] = {};
  const Reach across = Reach::of(shape, 1, column);
  for (Reach y = Reach::of(shape, 0, row); y.window <= y.last; y.go_on(call, 0)) {
    if (y.rest != 0) continue;
    for (Reach x = across; x.window <= x.last; x.go_on(call, 1)) {
      if (x.rest != 0) continue;
      Window<Type, kWidth> window;
      window.load(call, place_in(shape.out_size, shape.pieces, sample, y.window, x.window, piece));
      float grads[kWidth];
      window.read(call, grads);
      window.add(grads, y.tap * shape.geometry.kernel[1] + x.tap, sums);
    }
  }
  ((Vector*)call.grad_input)[place_in(shape.size, shape.pieces, sample, row, column, piece)] =
      Vector::of(sums);
}

template <class Type, int kWidth, int kKernel>
__device__ void spread(const MaxPoolBackwardCall& call) {
  if constexpr (kKernel > 0) {
    spread_to_pairs<Type, kWidth, kKernel>(call);
  } else {
    spread_to_each<Type, kWidth>(call);
  }
}

#define MAX_POOL(Type, suffix, width, windows, kernel)                                    \
  extern "C" __global__ void __launch_bounds__(kThreads)                                  \
      max_pool_##windows##_##suffix##_##width(const __grid_constant__ MaxPoolCall call) { \
    wait_for_inputs();                                                                    \
    let_next_start();                                                                     \
    pool<Type, width, kernel>(call);                                                      \
  }                                                                                       \
  extern "C" __global__ void __launch_bounds__(kThreads)                                  \
      max_pool_##windows##_##suffix##_##width##_backward(                                 \
          const __grid_constant__ MaxPoolBackwardCall call) {                             \
    wait_for_inputs();                                                                    \
    let_next_start();                                                                     \
    spread<Type, width, kernel>(call);                                                    \
  }

#define MAX_POOL_WINDOWS(Type, suffix, width) \
  MAX_POOL(Type, suffix, width, any, 0)       \
  MAX_POOL(Type, suffix, width, 2x2, 2)       \
  MAX_POOL(Type, suffix, width, 3x3, 3)

MAX_POOL_WINDOWS(Half, half, 8)
MAX_POOL_WINDOWS(Half, half, 1)
MAX_POOL_WINDOWS(BFloat16, bfloat16, 8)
MAX_POOL_WINDOWS(BFloat16, bfloat16, 1)
MAX_POOL_WINDOWS(Float, float, 4)
MAX_POOL_WINDOWS(Float, float, 1)
