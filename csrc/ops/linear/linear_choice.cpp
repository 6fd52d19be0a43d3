#include "ops/linear/linear_choice.h"

#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

namespace cudnn_ops {
namespace {

// By architecture, step and activation.
using Place = std::tuple<int, LinearStep, Activation>;

std::mutex mutex;

std::map<Place, std::vector<LinearChoice>>& tables() {
  static auto* all = new std::map<Place, std::vector<LinearChoice>>();
  return *all;
}

double distance(int64_t left, int64_t right) {
  return std::abs(std::log2(static_cast<double>(left) / static_cast<double>(right)));
}

}  // namespace

void set_linear_table(int sm_version, std::vector<LinearChoice> choices) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::erase_if(tables(),
                [&](const auto& entry) { return std::get<0>(entry.first) == sm_version; });
  for (const auto& choice : choices) {
    tables()[{sm_version, choice.problem.step, choice.problem.activation}].push_back(choice);
  }
}

LinearEngine choose_engine(int sm_version, const LinearProblem& problem) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto table = tables().find({sm_version, problem.step, problem.activation});
  LinearEngine nearest = LinearEngine::kOurs;
  if (table == tables().end()) return nearest;
  double least = std::numeric_limits<double>::infinity();
  for (const auto& [measured, engine] : table->second) {
    const double far = distance(measured.rows, problem.rows) +
                       distance(measured.columns, problem.columns) +
                       distance(measured.depth, problem.depth);
    if (far < least) least = far, nearest = engine;
  }
  return nearest;
}

}  // namespace cudnn_ops
