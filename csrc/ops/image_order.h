// The two orders in which images lie in memory: channels first, as they are counted, or channels
// last; both dense. As cudnn_ops/ops/image_order.py.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <limits>

namespace cudnn_ops {

using ImageStrides = c10::SmallVector<int64_t, 6>;

// Dense, with the channels innermost.
inline ImageStrides channels_last_strides(at::IntArrayRef sizes) {
  ImageStrides strides(sizes.size(), 1);
  int64_t step = sizes[1];
  for (size_t dim = sizes.size() - 1; dim >= 2; --dim) {
    strides[dim] = step;
    step *= sizes[dim];
  }
  strides[0] = step;
  return strides;
}

// The memory order of the results, nearest to that of the input: whether its channels are nearer to
// each other than its positions.
inline bool is_image_channels_last(const at::Tensor& input) {
  if (input.is_contiguous() || input.size(1) == 1) return false;
  int64_t nearest = std::numeric_limits<int64_t>::max();
  for (int64_t dim = 2; dim < input.dim(); ++dim) {
    if (input.size(dim) > 1) nearest = std::min(nearest, input.stride(dim));
  }
  return nearest != std::numeric_limits<int64_t>::max() && input.stride(1) < nearest;
}

// The two orders are then the same.
inline bool has_one_position(const at::Tensor& input) {
  for (int64_t dim = 2; dim < input.dim(); ++dim) {
    if (input.size(dim) != 1) return false;
  }
  return true;
}

}  // namespace cudnn_ops
