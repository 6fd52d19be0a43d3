// How the tensors of attention lie in memory: the order of their dimensions, and rows as the
// kernels require them, in one piece and a multiple of 8 long.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

namespace cudnn_ops {

// Strides of a dense tensor of `sizes` [B, H, S, D] whose first three dimensions lie in memory
// in the order of those of `like`, and whose last is contiguous.
std::array<int64_t, 4> dense_strides_like(c10::IntArrayRef sizes, const at::Tensor& like);

constexpr int64_t kRowUnit = 8;

// Sizes and strides that a compiler does not know count as regular: the checks hold them to that.
bool has_regular_size(const at::Tensor& tensor);
bool has_unit_stride(const at::Tensor& tensor);
// Both; true for a tensor that is refused for another reason, so that the checks say it.
bool has_regular_rows(const at::Tensor& tensor);
// Padded with zeros to a multiple of 8, with a last stride of 1. The head size becomes a constant,
// for a scale that follows from it is one.
at::Tensor with_regular_rows(const at::Tensor& tensor);
// The scale that the rows of `query` had before they were padded.
std::optional<double> scale_of_rows(std::optional<double> scale, const at::Tensor& query);

}  // namespace cudnn_ops
