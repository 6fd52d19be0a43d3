// Max pooling of images: what its files share. See cudnn_ops/ops/max_pool.py for the meaning of the
// arguments.
#pragma once

#include "kernels/max_pool.h"
#include "ops/operator.h"

#include <ATen/core/DimVector.h>

namespace cudnn_ops {

// Rows, then columns.
using MaxPoolPair = c10::SmallVector<int64_t, 2>;

struct MaxPoolNumbers {
  MaxPoolPair kernel_size, stride, padding, dilation;
  CUDNN_OPS_FIELDS(kernel_size, stride, padding, dilation)

  // Of numbers that are checked.
  MaxPoolWindows windows() const {
    const auto pair = [](const MaxPoolPair& numbers) {
      return std::array<int64_t, 2>{numbers[0], numbers[1]};
    };
    return {pair(kernel_size), pair(stride), pair(padding), pair(dilation)};
  }
};

// cudnn_ops::_max_pool2d_size, in the order of its schema.
struct MaxPool {
  at::Tensor input;
  MaxPoolNumbers numbers;
  bool ceil_mode = false;
  CUDNN_OPS_FIELDS(input, numbers, ceil_mode)
};

// cudnn_ops::_max_pool2d.
struct MaxPoolForward {
  MaxPool pool;
  bool with_offsets = false;
  CUDNN_OPS_FIELDS(pool, with_offsets)
};

// cudnn_ops::_max_pool2d_backward.
struct MaxPoolBackward {
  at::Tensor grad_out, offsets;
  OptionalTensor grad_more;  // added to the gradient
  at::SymDimVector size;     // of the input: H and W
  MaxPoolNumbers numbers;
  CUDNN_OPS_FIELDS(grad_out, offsets, grad_more, size, numbers)
};

// The output, and where in its window each number of it was; [0] where nobody asks for it.
using MaxPoolResults = std::tuple<at::Tensor, at::Tensor>;

// The public operator.
at::Tensor max_pool2d(const at::Tensor& input, at::IntArrayRef kernel_size, at::IntArrayRef stride,
                      at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode);

// Check, and say how large the output is.
at::SymDimVector max_pool_size(const MaxPool& args);
void check_max_pool_backward(const MaxPoolBackward& args);

}  // namespace cudnn_ops
