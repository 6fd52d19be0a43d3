// Times the plans of one graph on the live GPU, and what runs in their place.
#pragma once

#include "graph/cuda_call.h"

#include <c10/util/FunctionRef.h>

#include <vector>

namespace cudnn_ops::graph {

// GPU time of one call of each plan in milliseconds, on the inputs of `call` and on memory of its
// own in place of the outputs, on the current stream: some calls to warm up, then the median of
// several timed by events. Waits for the GPU. Infinite for a plan that does not run.
std::vector<double> time_plans(const Call& call, const std::vector<PlanPtr>& plans);

// The same of anything that launches kernels on the current stream.
double time_calls(c10::function_ref<void()> run);

}  // namespace cudnn_ops::graph
