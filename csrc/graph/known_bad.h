// What cuDNN accepts and is known to compute wrongly or to crash with: rules about a plan's
// parameters. Those of cudnn_ops/support/known_bad.json are part of the library, so that they hold
// in programs without Python too. Consulted whenever a plan is made.
#pragma once

#include "graph/plan_key.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace cudnn_ops::graph {

// A number of the parameters (facts()) or the remainder of a division ("key.size2 % 128"), a
// comparison (==, !=, <, <=, >, >=) and what to compare with.
struct Condition {
  std::string fact, comparison;
  int64_t value;
};

struct KnownBad {
  std::string id;
  std::string plan;                   // PlanKind::name
  std::pair<int64_t, int64_t> cudnn;  // first and last version, 91900 for 9.19.0
  std::pair<int64_t, int64_t> sm;     // first and last, 90 for compute capability 9.0
  std::vector<Condition> when;        // all of them
  std::string reason;
};

// Replaces the rules, for tests. Throws std::invalid_argument for a plan, fact or comparison that
// is none.
void set_known_bad(std::vector<KnownBad> rules);

// "reason (id)" of the first rule that a plan meets; empty where it meets none.
std::string known_bad(const PlanKey& key, int64_t sm_version, int64_t cudnn_version);

}  // namespace cudnn_ops::graph
