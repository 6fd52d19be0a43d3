#include "ops/linear/linear_choice.h"

#include "graph/cudnn_library.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

namespace cudnn_ops {
namespace {

// The logarithms of a product's rows, columns and depth, to compare sizes by their ratios.
using Place = std::array<float, 3>;
Place place_of(const LinearProblem& problem) {
  const auto log = [](int64_t size) { return std::log2(static_cast<float>(size)); };
  return {log(problem.rows), log(problem.columns), log(problem.depth)};
}

struct Measured {
  Place place;
  LinearChoice choice;
};

struct Table {
  size_t cudnn_version = 0;
  std::map<std::pair<LinearStep, Activation>, std::vector<Measured>> choices;
};

std::mutex mutex;
// Most tables name no graph: then a call costs no second look into them.
std::atomic<bool> is_any_graph_faster{false};

// By architecture.
std::map<int, Table>& tables() {
  static auto* all = new std::map<int, Table>();
  return *all;
}

// Null where nothing was measured for such a step; under the lock.
const Table* find_table(int sm_version) {
  const auto found = tables().find(sm_version);
  return found == tables().end() ? nullptr : &found->second;
}

struct Nearest {
  const LinearChoice* choice = nullptr;
  float distance = std::numeric_limits<float>::infinity();
};

Nearest nearest_of(const Table* table, const LinearProblem& problem) {
  Nearest nearest;
  if (table == nullptr) return nearest;
  const auto measured = table->choices.find({problem.step, problem.activation});
  if (measured == table->choices.end()) return nearest;
  const Place here = place_of(problem);
  for (const auto& [place, choice] : measured->second) {
    float distance = 0;
    for (size_t i = 0; i < here.size(); ++i) distance += std::abs(place[i] - here[i]);
    if (distance < nearest.distance) nearest = {&choice, distance};
  }
  return nearest;
}

// The tiles of a graph's kernel are chosen for a size: they say nothing of one that is further away
// than a factor of 8, over all three numbers.
constexpr float kFarthestGraph = 3;

bool is_of_this_cudnn(const Table& table) {
  return table.cudnn_version == graph::cudnn().version;
}

}  // namespace

void set_linear_table(int sm_version, size_t cudnn_version, std::vector<LinearChoice> choices) {
  Table table{cudnn_version, {}};
  for (auto& choice : choices) {
    table.choices[{choice.problem.step, choice.problem.activation}].push_back(
        {place_of(choice.problem), std::move(choice)});
  }
  const std::lock_guard<std::mutex> lock(mutex);
  tables()[sm_version] = std::move(table);
  bool is_any = false;
  for (const auto& [sm, each] : tables()) {
    for (const auto& [step, measured] : each.choices) {
      is_any = is_any || std::any_of(measured.begin(), measured.end(), [](const auto& found) {
                 return found.choice.is_graph_faster;
               });
    }
  }
  is_any_graph_faster = is_any;
}

LinearEngine choose_engine(int sm_version, const LinearProblem& problem) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [nearest, distance] = nearest_of(find_table(sm_version), problem);
  return nearest == nullptr ? LinearEngine::kOurs : nearest->engine;
}

bool is_graph_faster(int sm_version, const LinearProblem& problem) {
  if (!is_any_graph_faster.load(std::memory_order_relaxed)) return false;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto* table = find_table(sm_version);
  const auto [nearest, distance] = nearest_of(table, problem);
  return distance <= kFarthestGraph && nearest->is_graph_faster && is_of_this_cudnn(*table);
}

std::string measured_plan_engine(int sm_version, const LinearProblem& problem) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto* table = find_table(sm_version);
  const auto [nearest, distance] = nearest_of(table, problem);
  return nearest != nullptr && is_of_this_cudnn(*table) ? nearest->plan_engine : std::string();
}

}  // namespace cudnn_ops
