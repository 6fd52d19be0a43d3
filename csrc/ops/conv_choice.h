// cuDNN takes a convolution and its epilogue in one graph, or the bare convolution, whose epilogue
// is then a pass of our own over memory. It has other engines for either, and for some convolutions
// none for the former that is any good. Which is faster was measured (H200, cuDNN 9.19, 85
// geometries); the bare convolution's engines are those that torch runs.
#pragma once

#include "conv_problem.h"

#include <string_view>

namespace cudnn_ops {

// Why the convolution of these parameters should be run without the epilogue that they have, in
// words for users; empty where they have none, or where the graph of the whole is faster.
std::string_view reason_for_bare(const ConvParams& params);

}  // namespace cudnn_ops
