#include "ops/linear/linear_choice.h"

#include "graph/cudnn_library.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

namespace cudnn_ops {
namespace {

struct Table {
  size_t cudnn_version = 0;
  std::map<std::pair<LinearStep, Activation>, std::vector<LinearChoice>> choices;
};

std::mutex mutex;
// Most tables name no graph: then a call costs no second look into them.
std::atomic<bool> is_any_graph_faster{false};

// By architecture.
std::map<int, Table>& tables() {
  static auto* all = new std::map<int, Table>();
  return *all;
}

double distance(int64_t left, int64_t right) {
  return std::abs(std::log2(static_cast<double>(left) / static_cast<double>(right)));
}

// Null where nothing was measured for such a step; under the lock.
const Table* find_table(int sm_version) {
  const auto found = tables().find(sm_version);
  return found == tables().end() ? nullptr : &found->second;
}
const LinearChoice* nearest_of(const Table* table, const LinearProblem& problem) {
  if (table == nullptr) return nullptr;
  const auto measured = table->choices.find({problem.step, problem.activation});
  if (measured == table->choices.end()) return nullptr;
  const LinearChoice* nearest = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const auto& choice : measured->second) {
    const double far = distance(choice.problem.rows, problem.rows) +
                       distance(choice.problem.columns, problem.columns) +
                       distance(choice.problem.depth, problem.depth);
    if (far < least) least = far, nearest = &choice;
  }
  return nearest;
}

bool is_of_this_cudnn(const Table& table) {
  return table.cudnn_version == graph::cudnn().version;
}

}  // namespace

void set_linear_table(int sm_version, size_t cudnn_version, std::vector<LinearChoice> choices) {
  Table table{cudnn_version, {}};
  for (auto& choice : choices) {
    table.choices[{choice.problem.step, choice.problem.activation}].push_back(std::move(choice));
  }
  const std::lock_guard<std::mutex> lock(mutex);
  tables()[sm_version] = std::move(table);
  bool is_any = false;
  for (const auto& [sm, each] : tables()) {
    for (const auto& [place, measured] : each.choices) {
      is_any = is_any || std::any_of(measured.begin(), measured.end(),
                                     [](const auto& choice) { return choice.is_graph_faster; });
    }
  }
  is_any_graph_faster = is_any;
}

LinearEngine choose_engine(int sm_version, const LinearProblem& problem) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto* nearest = nearest_of(find_table(sm_version), problem);
  return nearest == nullptr ? LinearEngine::kOurs : nearest->engine;
}

bool is_graph_faster(int sm_version, const LinearProblem& problem) {
  if (!is_any_graph_faster.load(std::memory_order_relaxed)) return false;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto* table = find_table(sm_version);
  const auto* nearest = nearest_of(table, problem);
  return nearest != nullptr && nearest->is_graph_faster && is_of_this_cudnn(*table);
}

std::string measured_plan_engine(int sm_version, const LinearProblem& problem) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto* table = find_table(sm_version);
  const auto* nearest = nearest_of(table, problem);
  return nearest != nullptr && is_of_this_cudnn(*table) ? nearest->plan_engine : std::string();
}

}  // namespace cudnn_ops
