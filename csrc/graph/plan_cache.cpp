#include "graph/plan_cache.h"

#include "graph/error.h"
#include "graph/plan_policy.h"

#include <chrono>
#include <stdexcept>

namespace cudnn_ops::graph {

PlanCache& PlanCache::global() {
  static PlanCache* cache = new PlanCache();
  return *cache;
}

PlanCache::PlanPtr PlanCache::find(const PlanKey& key) {
  std::lock_guard<std::mutex> lock(mutex_);
  return find_locked(key);
}

bool PlanCache::contains(const PlanKey& key) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return index_.count(key) != 0;
}

std::optional<PlanKey> PlanCache::key_of(const Plan& plan) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [key, held] : entries_) {
    if (held.get() == &plan) return key;
  }
  return std::nullopt;
}

PlanCache::PlanPtr PlanCache::get(const PlanKey& key, c10::function_ref<PlanPtr()> build) {
  if (PlanPtr plan = find(key)) return plan;
  return build_missing(key, build);
}

PlanCache::PlanPtr PlanCache::find_locked(const PlanKey& key) {
  const auto found = index_.find(key);
  if (found == index_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, found->second);
  ++hits_;
  if (!recordings_.empty()) note(key);
  return found->second->second;
}

PlanCache::PlanPtr PlanCache::build_missing(const PlanKey& key,
                                            c10::function_ref<PlanPtr()> build) {
  std::promise<PlanPtr> promise;
  int64_t generation = 0;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      if (PlanPtr plan = find_locked(key)) return plan;
      const auto pending = building_.find(key);
      if (pending == building_.end()) break;
      const std::shared_future<PlanPtr> future = pending->second;
      ++hits_;
      lock.unlock();
      if (PlanPtr plan = future.get()) return plan;
      lock.lock();
      --hits_;  // that thread failed for a reason of its own: this one tries itself
    }
    building_.emplace(key, promise.get_future().share());
    generation = generation_;
  }

  PlanPtr plan;
  const auto give_up = [&] {
    std::lock_guard<std::mutex> lock(mutex_);
    building_.erase(key);
  };
  const auto start = std::chrono::steady_clock::now();
  try {
    plan = build();
  } catch (const NotSupported&) {  // the others would be told the same
    give_up();
    promise.set_exception(std::current_exception());
    throw;
  } catch (...) {
    give_up();
    promise.set_value(nullptr);
    throw;
  }
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  PlanPolicy::global().note_made(plan->origin().empty(), taken.count());
  Entries evicted;  // destroyed after the lock is released: unloading kernels takes a while
  {
    std::lock_guard<std::mutex> lock(mutex_);
    building_.erase(key);
    if (generation == generation_) insert(key, plan, evicted);
  }
  promise.set_value(plan);
  return plan;
}

void PlanCache::insert(const PlanKey& key, PlanPtr plan, Entries& evicted) {
  entries_.emplace_front(key, std::move(plan));
  index_.emplace(key, entries_.begin());
  ++(entries_.front().second->origin().empty() ? builds_ : loads_);
  if (!recordings_.empty()) note(key);
  shrink(evicted);
}

void PlanCache::shrink(Entries& evicted) {
  while (static_cast<int64_t>(entries_.size()) > limit_) {
    index_.erase(entries_.back().first);
    evicted.splice(evicted.begin(), entries_, std::prev(entries_.end()));
    ++evictions_;
  }
}

CacheInfo PlanCache::info() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return {hits_, builds_, loads_, evictions_, static_cast<int64_t>(entries_.size()), limit_};
}

void PlanCache::clear() {
  Entries dropped;
  std::lock_guard<std::mutex> lock(mutex_);
  dropped.swap(entries_);
  index_.clear();
  hits_ = builds_ = loads_ = evictions_ = 0;
  ++generation_;
}

void PlanCache::set_limit(int64_t limit) {
  if (limit < 1) throw std::invalid_argument("the plan cache's limit must be at least 1");
  Entries evicted;
  std::lock_guard<std::mutex> lock(mutex_);
  limit_ = limit;
  shrink(evicted);
}

int64_t PlanCache::start_recording() {
  std::lock_guard<std::mutex> lock(mutex_);
  recordings_[next_recording_];
  return next_recording_++;
}

std::vector<PlanKey> PlanCache::stop_recording(int64_t recording) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = recordings_.find(recording);
  if (found == recordings_.end()) throw std::invalid_argument("no such recording");
  std::vector<PlanKey> keys = std::move(found->second.keys);
  recordings_.erase(found);
  return keys;
}

void PlanCache::note(const PlanKey& key) {
  for (auto& [id, recording] : recordings_) {
    if (recording.seen.insert(key).second) recording.keys.push_back(key);
  }
}

}  // namespace cudnn_ops::graph
