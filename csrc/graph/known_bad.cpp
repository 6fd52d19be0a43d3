#include "graph/known_bad.h"

#include "graph/plan_kind.h"
#include "known_bad_rules.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <stdexcept>

namespace cudnn_ops::graph {
namespace {

std::mutex rules_mutex;

// `name` is a fact's, or "fact % number".
std::optional<int64_t> find(const Facts& facts, const std::string& name) {
  const size_t end = name.find(" % ");
  const auto found = std::find_if(facts.begin(), facts.end(), [&](const auto& fact) {
    return name.compare(0, end, fact.first) == 0;
  });
  if (found == facts.end()) return std::nullopt;
  if (end == std::string::npos) return found->second;
  return found->second % std::stoll(name.substr(end + 3));
}

bool holds(int64_t a, const std::string& comparison, int64_t b) {
  if (comparison == "==") return a == b;
  if (comparison == "!=") return a != b;
  if (comparison == "<") return a < b;
  if (comparison == "<=") return a <= b;
  if (comparison == ">") return a > b;
  if (comparison == ">=") return a >= b;
  throw std::invalid_argument("cudnn_ops: " + comparison + " is no comparison");
}

bool is_within(int64_t version, const std::pair<int64_t, int64_t>& range) {
  return version >= range.first && version <= range.second;
}

std::vector<KnownBad> checked(std::vector<KnownBad> all) {
  for (const auto& rule : all) {
    const Facts facts = kind_named(rule.plan).facts_of_nothing();
    for (const auto& [fact, comparison, value] : rule.when) {
      holds(0, comparison, value);
      if (!find(facts, fact)) {
        throw std::invalid_argument("cudnn_ops: a plan of " + rule.plan + " has no " + fact);
      }
    }
  }
  return all;
}

// Made at the first use, when every kind of plan is registered.
std::vector<KnownBad>& rules() {
  static auto* all = new std::vector<KnownBad>(checked(rules_of_the_package()));
  return *all;
}

}  // namespace

void set_known_bad(std::vector<KnownBad> all) {
  all = checked(std::move(all));
  const std::lock_guard<std::mutex> lock(rules_mutex);
  rules() = std::move(all);
}

std::string known_bad(const PlanKey& key, int64_t sm_version, int64_t cudnn_version) {
  const auto& kind = kind_of(key);
  const Facts facts = kind.facts(key);
  const std::lock_guard<std::mutex> lock(rules_mutex);
  for (const auto& rule : rules()) {
    if (rule.plan != kind.name || !is_within(cudnn_version, rule.cudnn) ||
        !is_within(sm_version, rule.sm)) {
      continue;
    }
    const bool is_met = std::all_of(rule.when.begin(), rule.when.end(), [&](const auto& condition) {
      return holds(*find(facts, condition.fact), condition.comparison, condition.value);
    });
    if (is_met) return rule.reason + " (" + rule.id + ")";
  }
  return {};
}

}  // namespace cudnn_ops::graph
