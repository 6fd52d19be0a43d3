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

// What computes it: a plan of cuDNN, kernels of ours for depthwise convolutions of one dimension
// (kernels/depthwise_conv1d.h) or of more (kernels/depthwise_conv.h) and for groups
// (kernels/grouped_conv.h), or torch's product of matrices.
enum class ConvKernel { kPlan, kDepthwise, kDepthwiseImages, kGrouped, kProduct };

struct KernelChoice {
  ConvKernel kernel = ConvKernel::kPlan;
  // Whose it is, empty for a plan's, and why it is that; in words for users.
  std::string_view engine, reason;
};

// Of a forward it matters whether there is an epilogue, whose pass a kernel of ours saves.
KernelChoice choose_kernel(const Conv& args, ConvStep step);

// For tests and benchmarks: which steps of depthwise convolutions of two and three dimensions our
// kernels compute, and which convolutions in groups, of those that they can. kMeasured, at first:
// those that they are faster for.
enum class KernelUse : int64_t { kMeasured, kNever, kAlways };
void set_depthwise_use(ConvStep step, KernelUse use);
void set_grouped_use(KernelUse use);

// Whether results have the length last in memory, as the input has: of depthwise convolutions of
// one dimension, whose kernels have that layout too. Those of all others, transposed ones among
// them, have the channels last. As `is_length_last` of cudnn_ops/ops/conv.py.
bool is_length_last(const Conv& args);

}  // namespace cudnn_ops
