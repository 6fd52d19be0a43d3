// From the arguments of a call to the plans that it needs: nothing here needs a GPU.
#pragma once

#include "conv_params.h"

namespace cudnn_ops {

// How much of the epilogue a plan takes: all; what comes before the residual; nothing.
enum class ConvFusion : int64_t { kAll, kBias, kNone };

// The rest of the epilogue is not the plan's.
ConvParams conv_params(const Conv& args, ConvFusion fusion);
ConvBackwardParams conv_backward_params(const Conv& args, bool is_of_weight);

}  // namespace cudnn_ops
