// Images on CUDA in one of the two orders of ops/image_order.h.
#pragma once

#include "ops/image_order.h"

#include <ATen/cuda/EmptyTensor.h>

#include <optional>

namespace cudnn_ops {

inline at::Tensor empty_in_order(at::IntArrayRef sizes, at::ScalarType dtype,
                                 const at::Device& device, bool is_last) {
  if (!is_last) return at::detail::empty_cuda(sizes, dtype, device, std::nullopt);
  return at::detail::empty_strided_cuda(sizes, channels_last_strides(sizes), dtype, device);
}

inline bool has_channels_last(const at::Tensor& tensor) {
  const auto strides = channels_last_strides(tensor.sizes());
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    const auto expected = strides[static_cast<size_t>(dim)];
    if (tensor.size(dim) > 1 && tensor.stride(dim) != expected) return false;
  }
  return true;
}

// A copy, at an address of the allocator's.
inline at::Tensor copy_in_order(const at::Tensor& tensor, bool is_last) {
  const at::Tensor copy =
      empty_in_order(tensor.sizes(), tensor.scalar_type(), tensor.device(), is_last);
  return copy.copy_(tensor);
}

// An image in that order; copied where its address is no multiple of so many bytes.
inline at::Tensor aligned_in_order(const at::Tensor& image, bool is_last, int64_t bytes) {
  const bool is_there = reinterpret_cast<uintptr_t>(image.const_data_ptr()) % bytes == 0;
  return is_there ? image : copy_in_order(image, is_last);
}

// Copied where it lies otherwise.
inline at::Tensor in_order(const at::Tensor& tensor, bool is_last) {
  const bool is_there = is_last ? has_channels_last(tensor) : tensor.is_contiguous();
  return is_there ? tensor : copy_in_order(tensor, is_last);
}

inline at::Tensor in_order(const std::optional<at::Tensor>& tensor, bool is_last) {
  return tensor ? in_order(*tensor, is_last) : at::Tensor();
}

}  // namespace cudnn_ops
