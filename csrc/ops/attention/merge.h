// Attention over more keys, merged into what is there: what its files share. See
// cudnn_ops/ops/merge.py for the formula.
#pragma once

#include "ops/operator.h"

namespace cudnn_ops {

inline constexpr const char* kMergeOp = "cudnn_ops::_merge_attention_state_: ";

struct AttentionMerge {
  at::Tensor out, lse, part, part_lse;
  CUDNN_OPS_FIELDS(out, lse, part, part_lse)
};

void check_attention_merge(const AttentionMerge& args);

}  // namespace cudnn_ops
