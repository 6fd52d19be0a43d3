#include "graph/plan_policy.h"

namespace cudnn_ops::graph {

PlanPolicy& PlanPolicy::global() {
  static PlanPolicy* policy = new PlanPolicy();
  return *policy;
}

bool PlanPolicy::takes_polymorphic(const PlanKey& exact, const PlanKey& family,
                                   c10::function_ref<bool()> is_served) {
  const Policy policy = this->policy();
  if (policy == Policy::kExact) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  if (refused_.count(family) != 0) return false;
  if (policy == Policy::kPolymorphic) return true;
  if (families_.size() >= kMaxEntries) families_.clear();
  const bool is_first = families_.insert(family).second;
  if (is_first && !is_served()) return false;
  if (calls_.size() >= kMaxEntries) calls_.clear();
  return ++calls_[exact] <= promote_after();
}

bool PlanPolicy::is_due(const PlanKey& exact, c10::function_ref<bool()> is_at_hand) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (refused_.count(exact) != 0) return false;
  if (calls_.size() >= kMaxEntries) calls_.clear();
  const int64_t calls = ++calls_[exact];
  return policy() == Policy::kExact || calls > promote_after() || (calls == 1 && is_at_hand());
}

void PlanPolicy::refuse(const PlanKey& family) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (refused_.size() >= kMaxEntries) refused_.clear();
  refused_.insert(family);
}

void PlanPolicy::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  families_.clear();
  refused_.clear();
  calls_.clear();
}

}  // namespace cudnn_ops::graph
