// How rows of pieces, pixels of channels among them, are spread over the threads of blocks.
#pragma once

#include "kernels/device_kernel.h"

#include <algorithm>

namespace cudnn_ops {

// A block has some pieces of each row, and as many rows at once as it has threads for; each thread
// loads `width` numbers at once.
struct RowTiling {
  static constexpr int64_t kThreads = 512;

  int64_t pieces, rows_at_once, strips;
  int threads;

  RowTiling(int64_t columns, int64_t width) {
    const int64_t row_pieces = columns / width;
    strips = divide_up(row_pieces, kThreads);
    pieces = divide_up(row_pieces, strips);
    rows_at_once = kThreads / pieces;
    threads = static_cast<int>(pieces * rows_at_once);
  }
  // How many blocks share the rows of a strip.
  int64_t stretches(int64_t rows, int64_t resident, int64_t least_turns) const {
    const int64_t least = rows_at_once * least_turns;
    return std::max<int64_t>(1, std::min(divide_up(rows, least), resident / strips));
  }
};

}  // namespace cudnn_ops
