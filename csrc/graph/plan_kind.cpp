#include "graph/plan_kind.h"

#include <unordered_map>

namespace cudnn_ops::graph {
namespace {

// Filled while the library is loaded and only read afterwards.
std::unordered_map<int64_t, PlanKind>& kinds() {
  static auto* all = new std::unordered_map<int64_t, PlanKind>();
  return *all;
}

}  // namespace

const PlanKind& kind_of(const PlanKey& key) {
  const auto found = key.words().empty() ? kinds().end() : kinds().find(key.words()[0]);
  if (found == kinds().end()) {
    throw std::invalid_argument("cudnn_ops: no operator of this version has such a plan");
  }
  return found->second;
}

const PlanKind& kind_named(const std::string& name) {
  const auto found = kinds().find(PlanKey::name_word(name.c_str()));
  if (found == kinds().end()) {
    throw std::invalid_argument("cudnn_ops: there are no plans of " + name);
  }
  return found->second;
}

void add_plan_kind(const PlanKind& kind) {
  kinds().emplace(PlanKey::name_word(kind.name), kind);
}

}  // namespace cudnn_ops::graph
