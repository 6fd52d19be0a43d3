// Sorting the rows of tokens by their experts, by kernels of ours (moe_order.cu).
#pragma once

#include <ATen/core/Tensor.h>

namespace cudnn_ops {

// How many experts can be told apart: a block's counts of them lie in shared memory.
constexpr int64_t kMostExperts = 2048;

// `experts`: [tokens, experts of each], int32 or int64, not empty; those that are none of
// `num_experts` stand for no expert. Writes where the rows of each expert end, `offsets`, int32
// [num_experts], and `positions`, int32 like `experts`: the row of each pair, or ~row of a pair
// without an expert, which come last. On the current device and stream.
void order_by_expert(const at::Tensor& experts, int64_t num_experts, const at::Tensor& offsets,
                     const at::Tensor& positions);

}  // namespace cudnn_ops
