#include "ops/norm/norm_choice.h"

#include "graph/cudnn_library.h"

#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

namespace cudnn_ops {
namespace {

struct Measured {
  bool is_faster;
  std::string engine;
};
using ByRows = std::map<int64_t, Measured>;
using ByRowBytes = std::map<int64_t, ByRows>;

struct Table {
  size_t cudnn_version = 0;
  std::map<std::pair<NormPlan, bool>, ByRowBytes> plans;
};

std::mutex mutex;

std::map<int, Table>& tables() {
  static auto* all = new std::map<int, Table>();
  return *all;
}

// What was measured for such a plan, or null; under the lock.
const ByRowBytes* find_sizes(int sm_version, NormPlan plan, bool is_layer) {
  const auto table = tables().find(sm_version);
  // Of a newer cuDNN the same holds; an engine that it does not have is its heuristics' choice.
  if (table == tables().end() || table->second.cudnn_version > graph::cudnn().version) {
    return nullptr;
  }
  const auto sizes = table->second.plans.find({plan, is_layer});
  return sizes == table->second.plans.end() ? nullptr : &sizes->second;
}

// Whether `test` holds for what is measured at `key`, or else on either side of it.
template <class Value, class Test>
bool holds_around(const std::map<int64_t, Value>& measured, int64_t key, const Test& test) {
  const auto above = measured.lower_bound(key);
  const bool is_above = above != measured.end();
  if (is_above && !test(above->second)) return false;
  if (above == measured.begin() || (is_above && above->first == key)) return true;
  return test(std::prev(above)->second);
}

double distance(int64_t left, int64_t right) {
  return std::abs(std::log2(static_cast<double>(left) / static_cast<double>(right)));
}

}  // namespace

void set_norm_table(int sm_version, size_t cudnn_version, std::vector<NormChoice> choices) {
  Table table{cudnn_version, {}};
  for (auto& choice : choices) {
    table.plans[{choice.plan, choice.is_layer}][choice.row_bytes].insert_or_assign(
        choice.rows, Measured{choice.is_faster, std::move(choice.engine)});
  }
  const std::lock_guard<std::mutex> lock(mutex);
  tables()[sm_version] = std::move(table);
}

bool is_cudnn_faster(int sm_version, NormPlan plan, bool is_layer, int64_t row_bytes,
                     int64_t rows) {
  const std::lock_guard<std::mutex> lock(mutex);
  const ByRowBytes* sizes = find_sizes(sm_version, plan, is_layer);
  // The ways to run rows wider than any that were measured are other ones.
  if (sizes == nullptr || row_bytes > sizes->rbegin()->first) return false;
  return holds_around(*sizes, row_bytes, [&](const ByRows& by_rows) {
    return holds_around(by_rows, rows, [](const Measured& measured) { return measured.is_faster; });
  });
}

std::string nearest_engine(int sm_version, NormPlan plan, bool is_layer, int64_t row_bytes,
                           int64_t rows) {
  const std::lock_guard<std::mutex> lock(mutex);
  const ByRowBytes* sizes = find_sizes(sm_version, plan, is_layer);
  if (sizes == nullptr) return {};
  double least = std::numeric_limits<double>::infinity();
  const std::string* nearest = nullptr;
  for (const auto& [measured_bytes, by_rows] : *sizes) {
    for (const auto& [measured_rows, measured] : by_rows) {
      // An engine depends on how a row is spread over threads more than on how many rows there are.
      const double far = 2 * distance(measured_bytes, row_bytes) + distance(measured_rows, rows);
      if (far < least) least = far, nearest = &measured.engine;
    }
  }
  return nearest == nullptr ? std::string() : *nearest;
}

}  // namespace cudnn_ops
