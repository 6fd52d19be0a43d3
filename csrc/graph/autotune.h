// Times the plans of one graph on the live GPU.
#pragma once

#include "graph/cuda_call.h"

#include <vector>

namespace cudnn_ops::graph {

// GPU time of one call of each plan in milliseconds, on the inputs of `call` and on memory of its
// own in place of the outputs, on the current stream: some calls to warm up, then the median of
// several timed by events. Waits for the GPU. Infinite for a plan that does not run.
std::vector<double> time_plans(const Call& call, const std::vector<PlanPtr>& plans);

}  // namespace cudnn_ops::graph
