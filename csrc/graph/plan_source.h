// Where a plan that the cache lacks comes from: the store on disk, a bundle, else a build.
#pragma once

#include "graph/plan.h"
#include "graph/plan_key.h"
#include "graph/target.h"

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace cudnn_ops::graph {

struct MeasuredEngine {
  std::string engine;  // Plan::engine()
  double ms;           // GPU time of one call; infinite where it builds and does not run
};

// The engines that were measured for a plan, in the order in which the heuristics name them.
struct Measurement {
  std::vector<int64_t> words;  // the plan's key
  std::vector<MeasuredEngine> engines;
};

// Times each of several plans of the same graph: as many numbers of milliseconds.
using TimePlans =
    c10::function_ref<std::vector<double>(const std::vector<std::shared_ptr<const Plan>>&)>;

// Whether there is a store or a bundle to ask, and whether one of them has this plan.
bool any_stored();
bool is_stored(const PlanKey& key, const Target& target);

// Reads the plan of `key` from the store or a bundle; where neither has it, builds it with the
// engine that the tuned table or cuDNN's heuristics name, and stores it. Throws NotSupported.
std::shared_ptr<const Plan> make_plan(const PlanKey& key, const Target& target);

// The same as bytes for a bundle (Plan::serialize), from the store or newly built; empty where the
// plan cannot be kept, and `why_not` says so.
std::string make_plan_bytes(const PlanKey& key, const Target& target, std::string& why_not);

// The same, with the engine that `time` finds to be the fastest. Unless `again`, a stored plan
// serves too if its engine was found so. `target_here` gives the target to the thread that calls
// it, for there may be several.
std::shared_ptr<const Plan> make_measured_plan(const PlanKey& key,
                                               c10::function_ref<Target()> target_here, bool again,
                                               TimePlans time);

// What make_measured_plan measured since the last call, the latest thousand at most.
std::vector<Measurement> take_measurements();

}  // namespace cudnn_ops::graph
