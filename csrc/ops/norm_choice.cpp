#include "norm_choice.h"

#include "../graph/cudnn_library.h"

#include <cmath>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace cudnn_ops {
namespace {

struct Table {
  size_t cudnn_version = 0;
  std::vector<NormChoice> choices;
};

std::mutex mutex;

std::unordered_map<int, Table>& tables() {
  static auto* all = new std::unordered_map<int, Table>();
  return *all;
}

double distance(int64_t one, int64_t other) {
  return std::abs(std::log2(static_cast<double>(one) / static_cast<double>(other)));
}

}  // namespace

void set_norm_table(int sm_version, size_t cudnn_version, std::vector<NormChoice> choices) {
  const std::lock_guard<std::mutex> lock(mutex);
  tables()[sm_version] = {cudnn_version, std::move(choices)};
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
  for (const auto& choice : table->second.choices) {
    if (choice.plan != plan || choice.is_layer != is_layer) continue;
    // An engine depends on how a row is spread over threads more than on how many rows there are.
    const double far = 2 * distance(choice.row_bytes, row_bytes) + distance(choice.rows, rows);
    if (far < least) least = far, found = &choice;
  }
  return found == nullptr ? nearest : *found;
}

}  // namespace cudnn_ops
