// From the arguments of a call to the plans that it needs: nothing here needs a GPU.
#pragma once

#include "ops/conv/conv_params.h"

namespace cudnn_ops {

// How much of the epilogue a plan takes: all; bias and residual; the bias; nothing.
enum class ConvFusion : int64_t { kAll, kLinear, kBias, kNone };

// The rest of the epilogue is not the plan's. `with_before`: what the activation is of is a result
// too, as it is of every plan that has no activation.
ConvParams conv_params(const Conv& args, ConvFusion fusion, bool with_before);
ConvBackwardParams conv_backward_params(const Conv& args, bool is_of_weight);

}  // namespace cudnn_ops
