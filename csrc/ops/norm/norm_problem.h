// The plans that a call needs, from its arguments. Nothing here needs a GPU.
#pragma once

#include "ops/norm/norm.h"
#include "ops/norm/norm_params.h"

namespace cudnn_ops {

// How many numbers a row has.
int64_t row_size(c10::SymIntArrayRef normalized_shape);

// Whether cuDNN needs a weight though the call has none: it supports neither a bias nor a backward
// without one.
bool needs_weight(const Norm& args, bool backward);

NormParams norm_params(const Norm& args, bool with_stats);
NormBackwardParams norm_backward_params(const Norm& args);

}  // namespace cudnn_ops
