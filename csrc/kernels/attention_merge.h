// Attention over two disjoint sets of keys as attention over both, by one kernel
// (attention_merge.cu).
#pragma once

#include <ATen/core/Tensor.h>

namespace cudnn_ops {

// Merges `part` and `part_lse` into `out` and `lse`: [B, H, S, D] with a last stride of 1, and
// float32 [B, H, S]. `part` is float16 or bfloat16, `out` of the same dtype or float32. On the
// current device and stream.
void merge_attention(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& part,
                     const at::Tensor& part_lse);

}  // namespace cudnn_ops
