// What an operator on CUDA returns for a tensor that nobody asked for.
#pragma once

#include <ATen/core/Tensor.h>

namespace cudnn_ops {

// The tensor, or [0] on the device of `like`, made without asking the allocator: a call has
// several.
inline at::Tensor or_none(const at::Tensor& tensor, const at::Tensor& like, at::ScalarType dtype) {
  if (tensor.defined()) return tensor;
  return at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, like.device()),
                   /*allocator=*/nullptr, /*resizable=*/false),
      c10::DispatchKeySet(c10::DispatchKey::CUDA), at::scalarTypeToTypeMeta(dtype));
}

}  // namespace cudnn_ops
