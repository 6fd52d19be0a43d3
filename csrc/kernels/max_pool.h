// The greatest number of each window of images, and its gradient, by kernels of our own
// (max_pool.cu).
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

namespace cudnn_ops {

// Rows, then columns.
struct MaxPoolWindows {
  std::array<int64_t, 2> kernel, stride, padding, dilation;
};

// A call's tensors are of its images' memory order, dense, with their channels first or last, and
// begin at an address that is a multiple of 16 bytes; none is empty. All are on the current device,
// and the kernels run on the current stream. Offsets are uint8: row * kernel width + column of the
// greatest number in its window.

// `offsets` is undefined where nobody asks for it.
void max_pool_forward(const at::Tensor& input, bool is_last, const MaxPoolWindows& windows,
                      const at::Tensor& out, const at::Tensor& offsets);

struct MaxPoolGrad {
  const at::Tensor &grad_out, &offsets;
  std::optional<at::Tensor> grad_more;  // added to it
};

void max_pool_backward(const MaxPoolGrad& args, bool is_last, const MaxPoolWindows& windows,
                       const at::Tensor& grad_input);

}  // namespace cudnn_ops
