// The plans that a call needs, from its arguments. Nothing here needs a GPU.
#pragma once

#include "ops/conv/conv.h"
#include "ops/conv/conv_params.h"

namespace cudnn_ops {

// How much of the epilogue a plan includes: all; bias and residual; the bias; nothing.
enum class ConvFusion : int64_t { kAll, kLinear, kBias, kNone };

// A plan without the rest of the epilogue. `with_before`: the activation's input is a result too,
// as in every plan without an activation.
ConvParams conv_params(const Conv& args, ConvFusion fusion, bool with_before);
ConvBackwardParams conv_backward_params(const Conv& args, bool is_of_weight);

}  // namespace cudnn_ops
