// Plans that no call waits for: a thread in the background makes them, one after the other, while
// their calls run on what they have. It starts when there is a plan to make, ends with the last
// one, and leaves in the cache what it made.
//
// There is one such thread at a time, and at no lower priority: it holds locks of cuDNN and of the
// driver, for which calls would wait. What goes wrong there reaches no call.
//
// Any thread may call anything here at any time.
#pragma once

#include "graph/plan.h"
#include "graph/plan_key.h"

#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <unordered_set>

namespace cudnn_ops::graph {

struct BackgroundInfo {
  int64_t pending;  // plans that are still to be made
  int64_t made;
  int64_t failed;  // plans that cuDNN refused, or failed to make
};

class BackgroundPlans {
 public:
  using Make = std::function<std::shared_ptr<const Plan>()>;

  // Never destroyed, as PlanCache. The child of a fork has another one: there the thread is gone,
  // and maybe left the lock taken.
  static BackgroundPlans& global();

  // Has `make` called in the thread for the plan of `key`, unless that is on its way. Where it
  // throws, PlanPolicy::refuse() is told, and there is one warning a process if it is a failure.
  void make(const PlanKey& key, Make make);

  // Waits for all that make() was asked for until now.
  void wait() const;

  // Forgets the plans whose turn has not come, and sets the counters to zero. The one that is being
  // made is not counted any more, nor is it refused.
  void clear();

  // The same, and waits for the thread to end; make() does nothing from then on. For the end of the
  // process: nobody may be in cuDNN, in CUDA or in Python while they end.
  void stop();

  BackgroundInfo info() const;

 private:
  struct Job {
    PlanKey key;
    Make make;
  };

  void work();
  void clear_locked();

  mutable std::mutex mutex_;
  std::deque<Job> queue_;
  std::unordered_set<PlanKey, PlanKeyHash> on_their_way_;  // in the queue, or being made
  std::shared_future<void> thread_;                        // ready when the thread has ended
  bool is_running_ = false;  // a thread that will look at the queue once more
  bool is_making_ = false, is_stopped_ = false;
  int64_t generation_ = 0;  // counts clear()s
  int64_t made_ = 0, failed_ = 0;
};

}  // namespace cudnn_ops::graph
