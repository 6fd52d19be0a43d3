#include "graph/engine_table.h"

#include "graph/cudnn_library.h"

#include <mutex>
#include <unordered_map>

namespace cudnn_ops::graph {
namespace {

struct Table {
  size_t cudnn_version = 0;
  std::unordered_map<PlanKey, std::string, PlanKeyHash> engines;  // keys without a target
};

std::mutex tables_mutex;

std::unordered_map<int, Table>& tables() {
  static auto* all = new std::unordered_map<int, Table>();
  return *all;
}

}  // namespace

void set_engine_table(int sm_version, size_t cudnn_version,
                      const std::vector<TunedEngine>& engines) {
  Table table{cudnn_version, {}};
  for (const auto& [words, engine] : engines) table.engines.emplace(PlanKey(words, 0), engine);
  std::lock_guard<std::mutex> lock(tables_mutex);
  tables()[sm_version] = std::move(table);
}

std::string tuned_engine(const PlanKey& key, int sm_version) {
  std::lock_guard<std::mutex> lock(tables_mutex);
  const auto table = tables().find(sm_version);
  if (table == tables().end() || table->second.cudnn_version != cudnn().version) return {};
  const auto found = table->second.engines.find(PlanKey(key.words(), 0));
  return found == table->second.engines.end() ? std::string() : found->second;
}

}  // namespace cudnn_ops::graph
