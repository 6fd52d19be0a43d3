// The arguments of the kernels of max_pool.cu, for both sides.
#pragma once

namespace max_pool_images {

// Threads of a block, at most.
constexpr int kThreads = 256;

}  // namespace max_pool_images

// Rows, then columns.
struct MaxPoolGeometry {
  int kernel[2], stride[2], padding[2], dilation[2];
};

// Images [samples, size..., channels] and what is made of them, [samples, out_size..., channels].
struct MaxPoolShape {
  MaxPoolGeometry geometry;
  int size[2], out_size[2];
  int pieces;  // of a pixel
  // How the work is spread over blocks: pieces of a pixel, rows and columns of a block; blocks that
  // have all pieces of a pixel, all columns and all rows. Columns of a block are a power of two.
  unsigned block_pieces, log2_columns, strips, across, down;
};

struct MaxPoolCall {
  MaxPoolShape shape;
  const void* input;
  void *out, *offsets;  // offsets: null where nobody asks for them
};

struct MaxPoolBackwardCall {
  MaxPoolShape shape;
  // more: added to the gradient; null where there is none.
  const void *grad_out, *more, *offsets;
  void* grad_input;
  // Of kernels that go over pairs of rows and columns: the first pair, which may begin before the
  // image.
  int first[2];
  // Of those for any kernel: how many taps further, and how much between two of them, an input is
  // in the window before.
  int taps[2], rest[2];
};
