#include "norm_choice.h"

#include "../graph/cudnn_library.h"

#include <cmath>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace cudnn_ops {
namespace {

// Where a size lies: ratios are distances. A call has little time for logarithms.
struct Place {
  double row_bytes, rows;

  Place(int64_t row_bytes, int64_t rows)
      : row_bytes(std::log2(static_cast<double>(row_bytes))),
        rows(std::log2(static_cast<double>(rows))) {
  }
  // An engine depends on how a row is spread over threads more than on how many rows there are.
  double distance(const Place& other) const {
    return 2 * std::abs(row_bytes - other.row_bytes) + std::abs(rows - other.rows);
  }
};

struct Table {
  size_t cudnn_version = 0;
  std::vector<std::pair<Place, NormChoice>> choices;
};

std::mutex mutex;

std::unordered_map<int, Table>& tables() {
  static auto* all = new std::unordered_map<int, Table>();
  return *all;
}

}  // namespace

void set_norm_table(int sm_version, size_t cudnn_version, std::vector<NormChoice> choices) {
  Table table{cudnn_version, {}};
  for (auto& choice : choices) {
    const Place place(choice.row_bytes, choice.rows);
    table.choices.emplace_back(place, std::move(choice));
  }
  const std::lock_guard<std::mutex> lock(mutex);
  tables()[sm_version] = std::move(table);
}

NormChoice nearest_choice(int sm_version, NormPlan plan, bool is_layer, int64_t row_bytes,
                          int64_t rows) {
  NormChoice nearest{plan, is_layer, row_bytes, rows, /*is_faster=*/false, {}};
  const std::lock_guard<std::mutex> lock(mutex);
  const auto table = tables().find(sm_version);
  if (table == tables().end() || table->second.cudnn_version != graph::cudnn().version) {
    return nearest;
  }
  double least = std::numeric_limits<double>::infinity();
  const NormChoice* found = nullptr;
  const Place wanted(row_bytes, rows);
  for (const auto& [place, choice] : table->second.choices) {
    if (choice.plan != plan || choice.is_layer != is_layer) continue;
    const double far = place.distance(wanted);
    if (far < least) least = far, found = &choice;
  }
  return found == nullptr ? nearest : *found;
}

}  // namespace cudnn_ops
