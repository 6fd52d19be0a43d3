// Exact or polymorphic? An exact plan serves one set of shapes; a polymorphic one, declared for
// more and longer sequences than it is given, serves every shape of its family: everything in the
// key but the batch and the lengths. The operator makes both; the policy says when which one runs.
//
// Any thread may call anything here at any time.
#pragma once

#include "graph/plan_key.h"
#include "graph/promotion.h"

#include <c10/util/FunctionRef.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>

namespace cudnn_ops::graph {

enum class Policy : uint8_t {
  // A family's first shape gets an exact plan, unless the polymorphic one is at hand. From the
  // second on, shapes run on the family's polymorphic plan, and a shape whose calls have lost
  // enough time on it gets an exact plan of its own (promotion.h).
  kAuto,
  kExact,        // an exact plan for each shape
  kPolymorphic,  // polymorphic plans wherever cuDNN supports them
};

enum class Autotune : uint8_t {
  kOff,
  kOnce,    // an exact plan that has to be built gets the engine measured to be the fastest
  kAlways,  // and the store is not asked whether it was measured before
};

// What a call without an exact plan runs on.
enum class Choice : uint8_t {
  kExact,        // an exact plan, which has to be made
  kPolymorphic,  // the family's polymorphic plan
  kPromoted,     // that has lost enough: an exact plan, as soon as it is made
};

// Whether a shape that another kernel can run as well is to have an exact plan.
enum class Due : uint8_t {
  kNo,
  kNow,    // the policy demands it, or it needs no build
  kOften,  // the shape is called often
};

class PlanPolicy {
 public:
  static PlanPolicy& global();

  Policy policy() const {
    return policy_.load(std::memory_order_relaxed);
  }
  void set_policy(Policy policy) {
    policy_.store(policy, std::memory_order_relaxed);
  }
  // How many calls a shape makes on a polymorphic plan before it gets its own, under kAuto;
  // kByTime where the time that they lose decides.
  static constexpr int64_t kByTime = -1;
  int64_t promote_after() const {
    return promote_after_.load(std::memory_order_relaxed);
  }
  void set_promote_after(int64_t calls) {
    promote_after_.store(calls, std::memory_order_relaxed);
  }
  Autotune autotune() const {
    return autotune_.load(std::memory_order_relaxed);
  }
  void set_autotune(Autotune autotune) {
    autotune_.store(autotune, std::memory_order_relaxed);
  }

  // What a call that has no exact plan yet runs on; notes the call, and that an exact plan would
  // run it faster by `lost` seconds. Without that no time is lost that would promote the shape.
  // `family` is the polymorphic plan's key without the sizes it is declared for.
  // `is_served` is asked at a family's first call: whether the polymorphic plan is at hand already;
  // `is_stored` at most once a shape: whether the exact one needs no build.
  Choice choose(const PlanKey& exact, const PlanKey& family, std::optional<double> lost,
                c10::function_ref<bool()> is_served, c10::function_ref<bool()> is_stored);

  // How long a plan took to be built, or to be read.
  void note_made(bool is_built, double seconds);

  // Whether a call that another kernel can run as well is to have its exact plan made; under kExact
  // it always is. Counts the call: it is due after promote_after() of them, or kOften where time
  // decides. `is_at_hand` is asked at the first call: whether that needs no build.
  Due due(const PlanKey& exact, c10::function_ref<bool()> is_at_hand);

  // cuDNN has no polymorphic plan for this family: from now on its plans are exact. Or not that
  // exact one, for which there is something else: it is never due again.
  void refuse(const PlanKey& key);

  // Forgets families and counts; the settings stay, and how long plans take.
  void clear();

 private:
  // More than a program has in use, and no more than 20 MB in all.
  static constexpr size_t kMaxEntries = 8192;
  static constexpr int64_t kOften = 256;

  std::atomic<Policy> policy_{Policy::kAuto};
  std::atomic<int64_t> promote_after_{kByTime};
  std::atomic<Autotune> autotune_{Autotune::kOff};
  std::mutex mutex_;
  std::unordered_set<PlanKey, PlanKeyHash> families_;
  std::unordered_set<PlanKey, PlanKeyHash> refused_;
  std::unordered_map<PlanKey, Promotion, PlanKeyHash> promotions_;
  std::unordered_map<PlanKey, int64_t, PlanKeyHash> calls_;
  MakingTimes times_;
};

}  // namespace cudnn_ops::graph
