#include "graph/background_plans.h"

#include "graph/error.h"
#include "graph/plan_cache.h"
#include "graph/plan_kind.h"
#include "graph/plan_policy.h"
#include "graph/warn.h"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <sys/prctl.h>

#include <atomic>
#include <cstdlib>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

namespace cudnn_ops::graph {
namespace {

std::atomic<BackgroundPlans*>& of_this_process() {
  static std::atomic<BackgroundPlans*> plans{new BackgroundPlans()};
  return plans;
}

// At the first plan: cuDNN and CUDA were loaded before, so that their destructors come after this.
void watch_process() {
  static const bool is_watched = [] {
    std::atexit([] { BackgroundPlans::global().stop(); });
    pthread_atfork(nullptr, nullptr, [] { of_this_process() = new BackgroundPlans(); });
    return true;
  }();
  (void)is_watched;
}

struct Outcome {
  bool is_good = true;
  std::string failure;  // empty for a refusal, which is no mistake
};

Outcome outcome_of(const PlanKey& key, const BackgroundPlans::Make& make) {
  try {
    PlanCache::global().get(key, [&] { return make(); });
    return {};
  } catch (const NotSupported&) {
    return {false, {}};
  } catch (const c10::Error& error) {
    return {false, error.what_without_backtrace()};
  } catch (const std::exception& error) {
    return {false, error.what()};
  } catch (...) {
    return {false, "it gave no reason"};
  }
}

void warn_once(const PlanKey& key, const std::string& failure) {
  try {
    CUDNN_OPS_WARN_ONCE("cudnn_ops: the plan ", kind_of(key).describe(key),
                        " could not be made in the background: ", failure,
                        ". Its calls run on what they have until cudnn_ops.cache_clear().");
  } catch (...) {
    // Warnings are errors there, and this thread has nobody to tell.
  }
}

}  // namespace

BackgroundPlans& BackgroundPlans::global() {
  return *of_this_process();
}

void BackgroundPlans::make(const PlanKey& key, Make make) {
  watch_process();
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_stopped_ || !on_their_way_.insert(key).second) return;
  queue_.push_back({key, std::move(make)});
  if (is_running_) return;
  try {
    thread_ = std::async(std::launch::async, [this] { work(); }).share();
    is_running_ = true;
  } catch (const std::system_error&) {  // as many threads as there may be: for another call to ask
    queue_.pop_back();
    on_their_way_.erase(key);
  }
}

void BackgroundPlans::work() {
  prctl(PR_SET_NAME, "cudnn_ops plans");
  std::unique_lock<std::mutex> lock(mutex_);
  while (!queue_.empty()) {
    std::optional<Job> job = std::move(queue_.front());
    queue_.pop_front();
    is_making_ = true;
    const int64_t generation = generation_;
    lock.unlock();
    const PlanKey key = job->key;
    const Outcome outcome = outcome_of(key, job->make);
    job.reset();
    if (!outcome.failure.empty()) warn_once(key, outcome.failure);
    lock.lock();
    is_making_ = false;
    if (generation != generation_) continue;
    if (!outcome.is_good) PlanPolicy::global().refuse(key);  // before it can be asked for again
    on_their_way_.erase(key);
    ++(outcome.is_good ? made_ : failed_);
  }
  is_running_ = false;
}

void BackgroundPlans::wait() const {
  std::shared_future<void> thread;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    thread = thread_;
  }
  if (thread.valid()) thread.wait();
}

void BackgroundPlans::clear_locked() {
  queue_.clear();
  on_their_way_.clear();
  made_ = failed_ = 0;
  ++generation_;
}

void BackgroundPlans::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  clear_locked();
}

void BackgroundPlans::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_stopped_ = true;
    clear_locked();
  }
  wait();
}

BackgroundInfo BackgroundPlans::info() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return {static_cast<int64_t>(queue_.size()) + (is_making_ ? 1 : 0), made_, failed_};
}

}  // namespace cudnn_ops::graph
