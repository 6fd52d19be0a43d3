// Where the rows of a tensor lie, for kernels that read them there (norm_rows_call.h).
#pragma once

#include "kernels/norm_rows_call.h"

#include <ATen/core/Tensor.h>

#include <optional>

namespace cudnn_ops {

// Whether every row of the last dimension starts at a multiple of 16 bytes.
bool are_rows_aligned(const at::Tensor& tensor);

// Rows counted by dimensions of such sizes and strides, where three strides can describe them.
std::optional<NormRows> describe_rows(at::IntArrayRef sizes, at::IntArrayRef strides);

// The rows of a tensor: as they lie, or copied where three strides cannot describe them.
class TensorRows {
 public:
  // Counted by the leading `row_dims` dimensions; none where the tensor is not defined.
  TensorRows(const at::Tensor& tensor, int64_t row_dims);
  // Described already.
  TensorRows(at::Tensor tensor, const NormRows& rows);

  const NormRows& get() const {
    return rows_;
  }
  // The bits that are set in the address of some row.
  uint64_t address_bits() const;

 private:
  at::Tensor tensor_;
  NormRows rows_{};
};

}  // namespace cudnn_ops
