// Engines that were measured to beat the one that cuDNN's heuristics name first. The tables come
// with the package (cudnn_ops/plans/tuned/), one a GPU architecture, and are handed over by Python.
#pragma once

#include "graph/plan_key.h"

#include <cstdint>
#include <string>
#include <vector>

namespace cudnn_ops::graph {

struct TunedEngine {
  std::vector<int64_t> words;  // PlanKey::words()
  std::string engine;          // Plan::engine()
};

// Takes the place of the table that `sm_version` had. The engines' names mean something to the
// cuDNN that they were read from, so with another one loaded the table is not consulted.
void set_engine_table(int sm_version, size_t cudnn_version, const std::vector<TunedEngine>& table);

// The engine for that plan on that architecture; empty where the heuristics decide.
std::string tuned_engine(const PlanKey& key, int sm_version);

}  // namespace cudnn_ops::graph
