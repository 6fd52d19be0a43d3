// Names of plans in profiles, on demand: torch names operators, and of a plan a profile shows only
// its kernels.
#pragma once

#include "graph/plan.h"

#include <string>

namespace cudnn_ops::graph {

enum class ProfileNames { kOff, kEngine, kPlan };

// For all threads.
void set_profile_names(ProfileNames names);

// The name of the range in which `plan` is executed for `op`: with its engine and workspace, and
// with all parameters of the plan where that is set. Empty where none is wanted. Read by
// cudnn_ops/plans/monitor.py.
std::string profile_name(const char* op, const Plan& plan);

}  // namespace cudnn_ops::graph
