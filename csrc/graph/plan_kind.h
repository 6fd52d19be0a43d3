// The kinds of plan that there are, by the name of their parameters: how to get from a key to a
// graph. Each operator's *_graph.cpp registers its own with a static RegisterPlanKind.
#pragma once

#include "graph/plan_key.h"
#include "graph/target.h"

#include <memory>
#include <string>
#include <vector>

namespace cudnn_ops::graph {

class FrontendGraph;

struct PlanKind {
  const char* name;
  // The functions of a key throw std::invalid_argument for words that are no such parameters.
  std::shared_ptr<FrontendGraph> (*make_graph)(const PlanKey& key, const Target& target);
  // The same with its operations in another order, where cuDNN has other engines for that; or null.
  std::shared_ptr<FrontendGraph> (*make_other_graph)(const PlanKey& key, const Target& target);
  // The engine that was measured to beat the heuristics' first; empty where they know best.
  std::string (*engine)(const PlanKey& key, const Target& target);
  // Those that a measurement should try beside the heuristics' own.
  std::vector<std::string> (*more_engines)(const PlanKey& key, const Target& target);
  std::string (*describe)(const PlanKey& key);
  Facts (*facts)(const PlanKey& key);
  Facts (*facts_of_nothing)();  // the names alone
};

// The kind of a key, or of that name. Throws std::invalid_argument when there is none.
const PlanKind& kind_of(const PlanKey& key);
const PlanKind& kind_named(const std::string& name);

void add_plan_kind(const PlanKind& kind);

template <class Params>
std::string heuristics_engine(const Params& /*params*/, const Target& /*target*/) {
  return {};
}

template <class Params>
std::shared_ptr<FrontendGraph> no_other_graph(const Params& /*params*/, const Target& /*target*/) {
  return nullptr;
}

template <class Params>
std::vector<std::string> no_more_engines(const Params& /*params*/, const Target& /*target*/) {
  return {};
}

template <class Params, std::shared_ptr<FrontendGraph> (*make)(const Params&, const Target&),
          std::string (*engine)(const Params&, const Target&) = heuristics_engine<Params>,
          std::shared_ptr<FrontendGraph> (*make_other)(const Params&, const Target&) =
              no_other_graph<Params>,
          std::vector<std::string> (*more_engines)(const Params&, const Target&) =
              no_more_engines<Params>>
struct RegisterPlanKind {
  RegisterPlanKind() {
    add_plan_kind({Params::kName,
                   [](const PlanKey& key, const Target& target) {
                     return make(KeyReader::read<Params>(key), target);
                   },
                   [](const PlanKey& key, const Target& target) {
                     return make_other(KeyReader::read<Params>(key), target);
                   },
                   [](const PlanKey& key, const Target& target) {
                     return engine(KeyReader::read<Params>(key), target);
                   },
                   [](const PlanKey& key, const Target& target) {
                     return more_engines(KeyReader::read<Params>(key), target);
                   },
                   [](const PlanKey& key) { return describe(KeyReader::read<Params>(key)); },
                   [](const PlanKey& key) { return graph::facts(KeyReader::read<Params>(key)); },
                   [] { return graph::facts(Params()); }});
  }
};

}  // namespace cudnn_ops::graph
