// Asks cuDNN about a plan without running it, on the live GPU or a described one.
#pragma once

#include "plan.h"
#include "target.h"

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>

namespace cudnn_ops::graph {

// supported, reason (empty if supported), engine, workspace in bytes
using Answer = std::tuple<bool, std::string, std::string, int64_t>;

// `device` is the JSON description of a GPU, or "current" for the live one.
Answer ask(const std::string& device,
           c10::function_ref<std::shared_ptr<const Plan>(const Target&)> build_plan);

}  // namespace cudnn_ops::graph
