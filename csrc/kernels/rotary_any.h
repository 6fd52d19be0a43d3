// What the launchers of rotary.cu and rotary_fp8.cu share.
#pragma once

#include "kernels/rotary.h"
#include "kernels/rotary_call.h"

namespace cudnn_ops {

// The tensor, copied if its last dimension does not lie densely; an undefined one as it is.
at::Tensor with_dense_last(const at::Tensor& tensor);

RotaryHeads heads_of(const at::Tensor& input, const at::Tensor& out);

// The index of types in tables of kernels: each with factors of the same and of float32.
int rotary_kernel_index(const at::Tensor& input, const at::Tensor& cos);

// The argument of a kernel that turns queries and keys, and the tensors that it reads; as in
// rotate_any().
struct RotaryAny {
  at::Tensor q, k, c, s;
  RotaryAnyCall call{};
  int64_t width;  // of a piece: 16 bytes, or one number
  bool is_wide;

  RotaryAny(const at::Tensor& query, const at::Tensor& key, const RotaryTurn& turn,
            const at::Tensor& query_out, const at::Tensor& key_out, bool may_be_wide);
};

}  // namespace cudnn_ops
