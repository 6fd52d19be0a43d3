// What every operator's CUDA kernel does around a plan: guard the device, find or build the
// plan, take workspace from torch's allocator, execute. Needs a CUDA build of torch.
#pragma once

#include "plan.h"
#include "plan_key.h"
#include "target.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include <memory>

namespace cudnn_ops::graph {

// Raises NotImplementedError unless device `index` is of compute capability 8.0 or newer.
void require_sm80(const char* op, int index);

// The current device, with this thread's cuDNN handle on the current stream.
Target live_target();

// Runs the plan of `params` on the current device and stream. On a miss `build_plan` makes
// it; what cuDNN refuses becomes a NotImplementedError with cuDNN's reason and `advice`.
// `pointers` are in the order that the plan takes them (Plan::execute).
void run_plan(const char* op, const PlanKey& key,
              c10::function_ref<std::shared_ptr<const Plan>(const Target&)> build_plan,
              c10::ArrayRef<void*> pointers, const char* advice);

}  // namespace cudnn_ops::graph
