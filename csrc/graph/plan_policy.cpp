#include "graph/plan_policy.h"

namespace cudnn_ops::graph {

PlanPolicy& PlanPolicy::global() {
  static PlanPolicy* policy = new PlanPolicy();
  return *policy;
}

bool PlanPolicy::takes_polymorphic(const PlanKey& exact, const PlanKey& family, double lost,
                                   c10::function_ref<bool()> is_served,
                                   c10::function_ref<bool()> is_stored) {
  const Policy policy = this->policy();
  if (policy == Policy::kExact) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  if (refused_.count(family) != 0) return false;
  if (policy == Policy::kPolymorphic) return true;
  if (families_.size() >= kMaxEntries) families_.clear();
  const bool is_first = families_.insert(family).second;
  if (is_first && !is_served()) return false;
  if (promotions_.size() >= kMaxEntries) promotions_.clear();
  Promotion& promotion = promotions_[exact];
  const int64_t calls = promote_after();
  const bool is_due =
      calls == kByTime ? promotion.is_due(lost, times_, is_stored) : promotion.is_due_after(calls);
  return !is_due;
}

void PlanPolicy::note_made(bool is_built, double seconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  times_.note(is_built, seconds);
}

bool PlanPolicy::is_due(const PlanKey& exact, c10::function_ref<bool()> is_at_hand) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (refused_.count(exact) != 0) return false;
  if (calls_.size() >= kMaxEntries) calls_.clear();
  const int64_t calls = ++calls_[exact];
  const int64_t often = promote_after() == kByTime ? kOften : promote_after();
  return policy() == Policy::kExact || calls > often || (calls == 1 && is_at_hand());
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
  promotions_.clear();
  calls_.clear();
}

}  // namespace cudnn_ops::graph
