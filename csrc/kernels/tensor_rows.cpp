#include "kernels/tensor_rows.h"

#include <array>

namespace cudnn_ops {
namespace {

bool has_dense_rows(const at::Tensor& tensor, int64_t row_dims) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  int64_t expected = 1;
  for (int64_t dim = tensor.dim() - 1; dim >= row_dims; --dim) {
    if (sizes[dim] != 1 && strides[dim] != expected) return false;
    expected *= sizes[dim];
  }
  return true;
}

}  // namespace

bool are_rows_aligned(const at::Tensor& tensor) {
  constexpr int64_t kBytes = 16;
  bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kBytes == 0;
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim) {
    aligned =
        aligned && tensor.stride(dim) * static_cast<int64_t>(tensor.element_size()) % kBytes == 0;
  }
  return aligned;
}

std::optional<NormRows> describe_rows(at::IntArrayRef sizes, at::IntArrayRef strides) {
  // From the innermost outwards, merging dimensions that continue one another.
  std::array<int64_t, 3> size{1, 1, 1}, stride{0, 0, 0};
  size_t levels = 0;
  for (int64_t dim = static_cast<int64_t>(sizes.size()) - 1; dim >= 0; --dim) {
    if (sizes[dim] == 1) continue;
    if (levels > 0 && strides[dim] == size[levels - 1] * stride[levels - 1]) {
      size[levels - 1] *= sizes[dim];
    } else {
      if (levels == size.size()) return std::nullopt;
      size[levels] = sizes[dim];
      stride[levels++] = strides[dim];
    }
  }
  if (levels <= 1) return NormRows{nullptr, stride[0], 0, 0, 0, 0};
  return NormRows{nullptr,
                  stride[2],
                  stride[1],
                  stride[0],
                  static_cast<unsigned>(size[1]),
                  static_cast<unsigned>(size[0])};
}

TensorRows::TensorRows(const at::Tensor& tensor, int64_t row_dims) : tensor_(tensor) {
  if (!tensor_.defined()) return;
  if (!tensor_.is_contiguous()) {
    const auto dims = static_cast<size_t>(row_dims);
    const auto rows =
        has_dense_rows(tensor_, row_dims)
            ? describe_rows(tensor_.sizes().slice(0, dims), tensor_.strides().slice(0, dims))
            : std::nullopt;
    if (rows) {
      rows_ = *rows;
    } else {
      tensor_ = tensor_.contiguous();
    }
  }
  if (tensor_.is_contiguous()) {
    int64_t columns = 1;
    for (int64_t dim = row_dims; dim < tensor_.dim(); ++dim) columns *= tensor_.size(dim);
    rows_ = {nullptr, columns, 0, 0, 0, 0};
  }
  rows_.data = tensor_.const_data_ptr();
}

TensorRows::TensorRows(at::Tensor tensor, const NormRows& rows)
    : tensor_(std::move(tensor)), rows_(rows) {
  rows_.data = tensor_.const_data_ptr();
}

uint64_t TensorRows::address_bits() const {
  const int64_t strides = rows_.stride | rows_.middle_stride | rows_.inner_stride;
  const int64_t bytes = tensor_.defined() ? static_cast<int64_t>(tensor_.element_size()) : 0;
  return reinterpret_cast<uintptr_t>(rows_.data) | static_cast<uint64_t>(strides * bytes);
}

}  // namespace cudnn_ops
