// When a shape on its family's polymorphic plan gets an exact plan of its own: once its calls have
// lost as much GPU time as the plan costs to make. Whatever comes next, no more than twice the best
// is lost that way, and a shape that comes back rarely builds nothing. No clock is read.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

namespace cudnn_ops::graph {

// Seconds that plans take to be made, as this process has seen.
class MakingTimes {
 public:
  // Of one that was made just now.
  void note(bool is_built, double seconds) {
    double& mean = is_built ? build_ : load_;
    const auto [least, most] = is_built ? std::pair{0.01, 2.0} : std::pair{0.0005, 0.02};
    mean += (std::clamp(seconds, least, most) - mean) / 4;
  }
  double build() const {
    return build_;
  }
  double load() const {
    return load_;
  }

 private:
  double build_ = 0.1, load_ = 0.003;
};

// What one shape has lost so far.
class Promotion {
 public:
  static constexpr int64_t kFewestCalls = 8;
  static constexpr int64_t kMostBackoff = 16;

  // Notes a call on the polymorphic plan that an exact one would have run `lost` seconds faster,
  // and says whether the exact one is due. A plan that was made and dropped since, for there were
  // too many, has to be worth twice as much, up to kMostBackoff times. `is_stored` is asked once,
  // when the losses are worth a plan that needs no build.
  template <class IsStored>
  bool is_due(double lost, const MakingTimes& times, const IsStored& is_stored) {
    lost_ += lost;
    if (++calls_ < kFewestCalls || lost_ < times.load() * backoff_) return false;
    if (stored_ == kUnknown) stored_ = is_stored() ? kYes : kNo;
    if (stored_ == kNo && lost_ < times.build() * backoff_) return false;
    const int64_t backoff = std::min(2 * backoff_, kMostBackoff);
    *this = Promotion();
    backoff_ = backoff;
    return true;
  }
  // The same where a number of calls decides, more than which are due.
  bool is_due_after(int64_t calls) {
    return ++calls_ > calls;
  }

 private:
  enum Answer : int8_t { kUnknown, kNo, kYes };

  double lost_ = 0;
  int64_t calls_ = 0, backoff_ = 1;
  Answer stored_ = kUnknown;
};

}  // namespace cudnn_ops::graph
