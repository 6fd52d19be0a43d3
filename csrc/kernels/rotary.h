// Rotary position embedding, and the rotation back (rotary.cu).
#pragma once

#include <ATen/core/Tensor.h>

namespace cudnn_ops {

// On the current device and stream. `input`: [B, H, S, D], `cos` and `sin`: [B or 1, S, D], with
// any strides; `out`: the input's sizes, in memory [B, S, H, D]. None of them is empty.
void rotate(const at::Tensor& input, const at::Tensor& cos, const at::Tensor& sin, bool is_backward,
            const at::Tensor& out);

// What turns, in which order, by what.
struct RotaryTurn {
  at::Tensor cos, sin, positions;  // positions undefined: cos and sin are no tables
  at::IntArrayRef sections;        // of pairs, four at most; empty: one of all
  int64_t size;                    // of what turns of a head
  bool is_interleaved, is_backward;
};

// Queries and keys by one kernel; `key` and its output are undefined where there are none. `cos`
// and `sin` are [B or 1, S, columns], or tables [N, columns] of at least one row; `positions` are
// then [B or 1, S], and one outside of the table takes its nearest row. With sections, what is of
// each token has one more dimension in front. Outputs: as there.
void rotate_any(const at::Tensor& query, const at::Tensor& key, const RotaryTurn& turn,
                const at::Tensor& query_out, const at::Tensor& key_out);

}  // namespace cudnn_ops
