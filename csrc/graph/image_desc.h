// Images as cuDNN's convolutions and batch norms have them.
#pragma once

#include "graph/tensor_desc.h"

#include <algorithm>

namespace cudnn_ops::graph {

// Dense, with the channels last, also in the strides of dimensions of size 1: cuDNN infers the
// layout of an image from all strides.
inline TensorDesc channels_last_desc(c10::ScalarType dtype, c10::IntArrayRef sizes) {
  TensorDesc desc;
  desc.dtype = dtype;
  desc.rank = static_cast<int>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), desc.sizes.begin());
  desc.strides[1] = 1;
  int64_t stride = sizes[1];
  for (size_t dim = sizes.size() - 1; dim > 1; --dim) {
    desc.strides[dim] = stride;
    stride *= sizes[dim];
  }
  desc.strides[0] = stride;
  return desc;
}

}  // namespace cudnn_ops::graph
