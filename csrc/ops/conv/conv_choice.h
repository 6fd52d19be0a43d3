// cuDNN runs a convolution and its epilogue in one graph, or the bare convolution, whose epilogue
// is then a pass of our own over memory. The two have different engines, and for some convolutions
// those with an epilogue are slow. Which is faster was measured (H200, cuDNN 9.19, over 90
// geometries); the bare convolution's engines are those that torch runs. For depthwise convolutions
// of one dimension no engine is as fast as a kernel of ours, and for kernels as large as the input
// none as fast as a product of matrices.
#pragma once

#include "ops/conv/conv_problem.h"

#include <string_view>

namespace cudnn_ops {

// Why the convolution of these parameters should run without their epilogue, in words for users;
// empty where they have none, or where the graph of the whole is faster.
std::string_view reason_for_bare(const ConvParams& params);

// What is computed: the convolution, or one of its gradients.
enum class ConvStep : int64_t { kForward, kInputGradient, kWeightGradient };

// What computes it: a plan of cuDNN, kernels of ours (kernels/depthwise_conv1d.h), or torch's
// product of matrices.
enum class ConvKernel { kPlan, kDepthwise, kProduct };

struct KernelChoice {
  ConvKernel kernel = ConvKernel::kPlan;
  std::string_view engine, reason;  // whose it is and why no plan runs, in words for users
};

KernelChoice choose_kernel(const Conv& args, ConvStep step);

// Whether results have the length last in memory, as the input has: of depthwise convolutions of
// one dimension, whose kernels have that layout too. Those of all others have the channels last. As
// `is_length_last` of cudnn_ops/ops/conv.py.
bool is_length_last(const Conv& args);

}  // namespace cudnn_ops
