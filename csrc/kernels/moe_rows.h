// From tokens to the rows of their experts and back, by kernels of ours (moe_scatter.cu and
// moe_combine.cu).
#pragma once

#include <ATen/core/Tensor.h>

namespace cudnn_ops {

// `positions`: int32 [tokens, experts of each], as order_by_expert() writes them. All of these are
// on the current device and stream, of tensors that are not empty.

// Copies each of `tokens`, [tokens, columns] with any strides, to its `rows`, contiguous [rows,
// columns]; those without an expert become 0.
void scatter_tokens(const at::Tensor& tokens, const at::Tensor& positions, const at::Tensor& rows);

// `tokens`, contiguous, become the sums of their `rows` times `weights`, [tokens, experts of each]
// of the rows' dtype or float32, or not defined: 1.
void combine_rows(const at::Tensor& rows, const at::Tensor& positions, const at::Tensor& weights,
                  const at::Tensor& tokens);

// The gradients of `rows` and `weights`, contiguous; not computed where they are not defined.
// `rows` is read for that of the weights alone.
void combine_rows_backward(const at::Tensor& grad_tokens, const at::Tensor& rows,
                           const at::Tensor& positions, const at::Tensor& weights,
                           const at::Tensor& grad_rows, const at::Tensor& grad_weights);

}  // namespace cudnn_ops
