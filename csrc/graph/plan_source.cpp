#include "graph/plan_source.h"

#include "graph/cudnn_library.h"
#include "graph/engine_table.h"
#include "graph/error.h"
#include "graph/known_bad.h"
#include "graph/plan_bundle.h"
#include "graph/plan_kind.h"
#include "graph/plan_store.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <exception>
#include <iterator>
#include <mutex>
#include <utility>

namespace cudnn_ops::graph {
namespace {

constexpr size_t kMaxMeasurements = 1000;
std::mutex measurements_mutex;

std::deque<Measurement>& measurements() {
  static auto* all = new std::deque<Measurement>();
  return *all;
}

std::shared_ptr<const Plan> load_stored(const PlanKey& key, const Target& target,
                                        bool only_measured) {
  const auto bytes = PlanStore::global().load(key, target.gpu());
  if (!bytes) return nullptr;
  try {
    if (only_measured && Plan::choice_in(*bytes) != EngineChoice::kMeasured) return nullptr;
    return Plan::deserialize(*bytes, target, "store");
  } catch (const std::runtime_error&) {
    return nullptr;  // intact, yet cuDNN refuses it: building the plan tells why, if at all
  }
}

std::shared_ptr<const Plan> load_bundled(const PlanKey& key, const Target& target) {
  PlanBundles::global().find_for(target);
  const auto bundle = PlanBundles::global().with(key);
  const auto bytes = bundle == nullptr ? std::nullopt : bundle->load(key);
  if (!bytes) return nullptr;
  try {
    return Plan::deserialize(*bytes, target, bundle->label());
  } catch (const std::runtime_error& error) {
    bundle->warn_once(error.what());  // it was made for this GPU: whoever made it wants to know
    return nullptr;
  }
}

void save(const PlanKey& key, const Target& target, const Plan& plan, EngineChoice choice) {
  if (plan.is_makeshift() || !PlanStore::global().is_on()) return;
  PlanStore::global().save(key, target.gpu(), plan.serialize(choice));
}

std::shared_ptr<const Plan> build(const PlanKind& kind, const PlanKey& key, const Target& target,
                                  const std::string& engine) {
  try {
    return Plan::build(kind.make_graph(key, target), target, engine);
  } catch (const NotSupported&) {
    auto other = kind.make_other_graph(key, target);
    if (other == nullptr) throw;
    return Plan::build(std::move(other), target, engine);
  }
}

std::vector<std::shared_ptr<const Plan>> build_all(const PlanKind& kind, const PlanKey& key,
                                                   c10::function_ref<Target()> target_here) {
  std::vector<std::shared_ptr<const Plan>> plans;
  std::exception_ptr refusal;
  const auto add = [&](decltype(kind.make_graph) make, const std::vector<std::string>& engines) {
    try {
      auto more = Plan::build_all([&](const Target& target) { return make(key, target); },
                                  target_here, engines);
      plans.insert(plans.end(), std::make_move_iterator(more.begin()),
                   std::make_move_iterator(more.end()));
    } catch (const NotSupported&) {
      if (refusal == nullptr) refusal = std::current_exception();
    }
  };
  add(kind.make_graph, kind.more_engines(key, target_here()));
  add(kind.make_other_graph, {});
  if (plans.empty()) std::rethrow_exception(refusal);
  return plans;
}

void refuse_known_bad(const PlanKey& key, const Target& target) {
  const auto version = static_cast<int64_t>(cudnn().version);
  const std::string reason = known_bad(key, target.sm_version(), version);
  if (!reason.empty()) throw NotSupported("it accepts this and is known to " + reason);
}

// With the engine that the tuned table or cuDNN's heuristics name.
std::pair<std::shared_ptr<const Plan>, EngineChoice> build_chosen(const PlanKey& key,
                                                                  const Target& target) {
  const auto& kind = kind_of(key);
  std::string engine = tuned_engine(key, target.sm_version());
  if (engine.empty()) engine = kind.engine(key, target);
  auto plan = build(kind, key, target, engine);
  const bool is_chosen = !engine.empty() && plan->engine() == engine;
  return {std::move(plan), is_chosen ? EngineChoice::kTable : EngineChoice::kHeuristic};
}

}  // namespace

bool any_stored() {
  return PlanStore::global().is_on() || PlanBundles::global().any();
}

bool is_stored(const PlanKey& key, const Target& target) {
  return PlanStore::global().contains(key, target.gpu()) ||
         PlanBundles::global().with(key) != nullptr;
}

std::shared_ptr<const Plan> make_plan(const PlanKey& key, const Target& target) {
  kind_of(key);  // throws for what is no key
  refuse_known_bad(key, target);
  if (auto plan = load_stored(key, target, /*only_measured=*/false)) return plan;
  if (auto plan = load_bundled(key, target)) return plan;
  const auto [plan, choice] = build_chosen(key, target);
  save(key, target, *plan, choice);
  return plan;
}

std::string make_plan_bytes(const PlanKey& key, const Target& target, std::string& why_not) {
  kind_of(key);
  refuse_known_bad(key, target);
  if (auto bytes = PlanStore::global().load(key, target.gpu())) return *bytes;
  const auto [plan, choice] = build_chosen(key, target);
  if (plan->is_makeshift()) {
    why_not =
        "an engine that cuDNN prefers cannot be built on this machine: " + plan->preferred_failed();
    return {};
  }
  auto bytes = plan->serialize(choice);
  if (bytes.empty()) why_not = "cuDNN cannot store a plan with engine " + plan->engine();
  PlanStore::global().save(key, target.gpu(), bytes);
  return bytes;
}

std::shared_ptr<const Plan> make_measured_plan(const PlanKey& key,
                                               c10::function_ref<Target()> target_here, bool again,
                                               TimePlans time) {
  const auto& kind = kind_of(key);
  const Target target = target_here();
  refuse_known_bad(key, target);
  if (!again) {
    if (auto plan = load_stored(key, target, /*only_measured=*/true)) return plan;
  }
  auto plans = build_all(kind, key, target_here);
  const std::vector<double> ms = time(plans);
  const auto best = static_cast<size_t>(std::min_element(ms.begin(), ms.end()) - ms.begin());
  if (!std::isfinite(ms[best])) throw CudnnError("none of cuDNN's engines for this runs");
  Measurement measurement{key.words().vec(), {}};
  for (size_t i = 0; i < plans.size(); ++i) {
    measurement.engines.push_back({plans[i]->engine(), ms[i]});
  }
  {
    std::lock_guard<std::mutex> lock(measurements_mutex);
    auto& all = measurements();
    if (all.size() == kMaxMeasurements) all.pop_front();
    all.push_back(std::move(measurement));
  }
  const auto winner = plans[best];
  plans.clear();
  winner->drop_rivals();
  save(key, target, *winner, EngineChoice::kMeasured);
  return winner;
}

std::vector<Measurement> take_measurements() {
  std::lock_guard<std::mutex> lock(measurements_mutex);
  std::vector<Measurement> taken(measurements().begin(), measurements().end());
  measurements().clear();
  return taken;
}

}  // namespace cudnn_ops::graph
