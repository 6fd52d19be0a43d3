#include "graph/plan_policy.h"

namespace cudnn_ops::graph {

PlanPolicy& PlanPolicy::global() {
  static PlanPolicy* policy = new PlanPolicy();
  return *policy;
}

Choice PlanPolicy::choose(const PlanKey& exact, const PlanKey& family, std::optional<double> lost,
                          c10::function_ref<bool()> is_served,
                          c10::function_ref<bool()> is_stored) {
  const Policy policy = this->policy();
  if (policy == Policy::kExact) return Choice::kExact;
  std::lock_guard<std::mutex> lock(mutex_);
  if (refused_.count(family) != 0) return Choice::kExact;
  if (policy == Policy::kPolymorphic) return Choice::kPolymorphic;
  if (families_.size() >= kMaxEntries) families_.clear();
  const bool is_first = families_.insert(family).second;
  if (is_first && !is_served()) return Choice::kExact;
  const int64_t calls = promote_after();
  if (calls == kByTime && !lost) return Choice::kPolymorphic;
  if (promotions_.size() >= kMaxEntries) promotions_.clear();
  Promotion& promotion = promotions_[exact];
  const bool is_due =
      calls == kByTime ? promotion.is_due(*lost, times_, is_stored) : promotion.is_due_after(calls);
  return is_due && refused_.count(exact) == 0 ? Choice::kPromoted : Choice::kPolymorphic;
}

void PlanPolicy::note_made(bool is_built, double seconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  times_.note(is_built, seconds);
}

Due PlanPolicy::due(const PlanKey& exact, c10::function_ref<bool()> is_at_hand) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (refused_.count(exact) != 0) return Due::kNo;
  if (calls_.size() >= kMaxEntries) calls_.clear();
  const int64_t calls = ++calls_[exact];
  const int64_t often = promote_after() == kByTime ? kOften : promote_after();
  if (policy() == Policy::kExact || (calls == 1 && is_at_hand())) return Due::kNow;
  return calls > often ? Due::kOften : Due::kNo;
}

void PlanPolicy::refuse(const PlanKey& key) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (refused_.size() >= kMaxEntries) refused_.clear();
  refused_.insert(key);
}

void PlanPolicy::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  families_.clear();
  refused_.clear();
  promotions_.clear();
  calls_.clear();
}

}  // namespace cudnn_ops::graph
