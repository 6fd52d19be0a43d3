#include "graph/profile_names.h"

#include "graph/plan_cache.h"
#include "graph/plan_kind.h"

#include <atomic>

namespace cudnn_ops::graph {
namespace {

std::atomic<ProfileNames> wanted{ProfileNames::kOff};

}  // namespace

void set_profile_names(ProfileNames names) {
  wanted.store(names, std::memory_order_relaxed);
}

std::string profile_name(const char* op, const Plan& plan) {
  const ProfileNames names = wanted.load(std::memory_order_relaxed);
  if (names == ProfileNames::kOff) return {};
  std::string name = std::string("cuDNN ") + plan.engine() + " of " + op + " (" +
                     std::to_string(plan.workspace_bytes()) + " bytes of workspace)";
  if (names == ProfileNames::kEngine) return name;
  const auto key = PlanCache::global().key_of(plan);
  return key ? name + ": " + kind_of(*key).describe(*key) : name;
}

}  // namespace cudnn_ops::graph
