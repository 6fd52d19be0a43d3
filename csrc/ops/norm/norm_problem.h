// From the arguments of a call to the plans that it needs: nothing here needs a GPU.
#pragma once

#include "ops/norm/norm.h"
#include "ops/norm/norm_params.h"

namespace cudnn_ops {

// How many numbers a row has.
int64_t row_size(c10::SymIntArrayRef normalized_shape);

// Whether cuDNN is given a weight though the call has none: it knows no bias without one, and no
// backward.
bool needs_weight(const Norm& args, bool backward);

NormParams norm_params(const Norm& args, bool with_stats);
NormBackwardParams norm_backward_params(const Norm& args);

}  // namespace cudnn_ops
