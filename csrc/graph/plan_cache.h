// The process-wide cache of built plans, bounded, least recently used out first.
//
// Any thread may call anything here at any time. A hit holds the lock for one look-up. A
// build holds no lock: other keys go on, and threads that want the same key wait for it
// instead of building it again; where it fails, they try one after the other.
#pragma once

#include "graph/plan.h"
#include "graph/plan_key.h"

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace cudnn_ops::graph {

struct CacheInfo {
  int64_t hits;
  int64_t builds;     // plans built, successfully
  int64_t loads;      // plans read from the store or a bundle instead
  int64_t evictions;  // plans dropped because the limit was reached
  int64_t size;       // plans held now
  int64_t limit;
};

class PlanCache {
 public:
  using PlanPtr = std::shared_ptr<const Plan>;

  // Never destroyed: at process exit the CUDA context may go before static destructors run.
  static PlanCache& global();

  // The plan of `key`, or null when there is none yet.
  PlanPtr find(const PlanKey& key);

  // Whether find() would give one. Counts and records nothing.
  bool contains(const PlanKey& key) const;

  // What `plan` is the plan of; nothing if it has been dropped. Looks at all of them.
  std::optional<PlanKey> key_of(const Plan& plan) const;

  // The plan of `key`, from `build` if it is not there yet. NotSupported reaches every thread that
  // waits for it; whatever else `build` throws may be this thread's own trouble, such as a capture,
  // and reaches this thread alone. The next call tries again.
  PlanPtr get(const PlanKey& key, c10::function_ref<PlanPtr()> build);

  CacheInfo info() const;
  // Drops every plan and sets the counters to zero. Plans in use live on until released.
  void clear();
  // At least 1. Shrinks at once.
  void set_limit(int64_t limit);

  // From start_recording() on, notes the key of every plan that is found or built, once.
  // Recordings may overlap; each ends with stop_recording(what its start returned), which
  // returns the keys noted since then.
  int64_t start_recording();
  std::vector<PlanKey> stop_recording(int64_t recording);

 private:
  using Entries = std::list<std::pair<PlanKey, PlanPtr>>;  // most recently used first
  struct Recording {
    std::vector<PlanKey> keys;
    std::unordered_set<PlanKey, PlanKeyHash> seen;
  };

  PlanPtr find_locked(const PlanKey& key);
  PlanPtr build_missing(const PlanKey& key, c10::function_ref<PlanPtr()> build);
  void insert(const PlanKey& key, PlanPtr plan, Entries& evicted);
  void shrink(Entries& evicted);
  void note(const PlanKey& key);

  mutable std::mutex mutex_;
  Entries entries_;
  std::unordered_map<PlanKey, Entries::iterator, PlanKeyHash> index_;
  std::unordered_map<PlanKey, std::shared_future<PlanPtr>, PlanKeyHash> building_;
  std::unordered_map<int64_t, Recording> recordings_;
  int64_t next_recording_ = 0;
  int64_t generation_ = 0;  // counts clear()s: a build that began before one is not kept
  int64_t hits_ = 0;
  int64_t builds_ = 0;
  int64_t loads_ = 0;
  int64_t evictions_ = 0;
  int64_t limit_ = 512;
};

}  // namespace cudnn_ops::graph
