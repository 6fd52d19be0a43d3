#include "api.h"

#include "ops/context_parallel.h"
#include "ops/norm/norm_choice.h"
#include "graph/cudnn_library.h"
#include "graph/device_query.h"
#include "graph/engine_table.h"
#include "graph/known_bad.h"
#include "graph/plan_bundle.h"
#include "graph/plan_cache.h"
#include "graph/plan_kind.h"
#include "graph/plan_policy.h"
#include "graph/plan_record.h"
#include "graph/plan_source.h"
#include "graph/plan_store.h"
#include "graph/target.h"
#include "graph/warn.h"

#include <cudnn_frontend_version.h>
#include <torch/version.h>

namespace cudnn_ops::api {

Versions versions() {
#ifdef CUDNN_OPS_WITH_CUDA
  constexpr bool with_cuda = true;
#else
  constexpr bool with_cuda = false;
#endif
  return {TORCH_VERSION, CUDNN_VERSION, CUDNN_FRONTEND_VERSION, with_cuda, graph::graphs_version()};
}

void set_warner(void (*warner)(const char* message)) {
  graph::set_warner(warner);
}

CacheInfo cache_info() {
  const auto info = graph::PlanCache::global().info();
  return {info.hits, info.builds, info.loads, info.evictions, info.size, info.limit};
}

void cache_clear() {
  graph::PlanCache::global().clear();
  graph::PlanPolicy::global().clear();
}

void set_cache_limit(int64_t limit) {
  graph::PlanCache::global().set_limit(limit);
}

int64_t start_recording() {
  return graph::PlanCache::global().start_recording();
}

std::vector<Words> stop_recording(int64_t recording) {
  std::vector<Words> result;
  for (const auto& key : graph::PlanCache::global().stop_recording(recording)) {
    result.push_back(key.words().vec());
  }
  return result;
}

std::string describe_plan(const Words& words) {
  const graph::PlanKey key(words, 0);
  return graph::kind_of(key).describe(key);
}

std::tuple<bool, std::string, std::string, int64_t> make_plan(const Words& words,
                                                              const std::string& device) {
  return graph::ask(words, device);
}

int64_t policy() {
  return static_cast<int64_t>(graph::PlanPolicy::global().policy());
}

void set_policy(int64_t policy) {
  graph::PlanPolicy::global().set_policy(static_cast<graph::Policy>(policy));
}

int64_t promote_after() {
  return graph::PlanPolicy::global().promote_after();
}

void set_promote_after(int64_t calls) {
  graph::PlanPolicy::global().set_promote_after(calls);
}

int64_t autotune() {
  return static_cast<int64_t>(graph::PlanPolicy::global().autotune());
}

void set_autotune(int64_t autotune) {
  graph::PlanPolicy::global().set_autotune(static_cast<graph::Autotune>(autotune));
}

std::vector<std::pair<Words, std::vector<std::pair<std::string, double>>>> take_measurements() {
  std::vector<std::pair<Words, std::vector<std::pair<std::string, double>>>> result;
  for (const auto& [words, engines] : graph::take_measurements()) {
    result.push_back({words, {}});
    auto& times = result.back().second;
    for (const auto& [engine, ms] : engines) times.emplace_back(engine, ms);
  }
  return result;
}

void set_engine_table(int64_t sm_version, int64_t cudnn_version,
                      const std::vector<std::pair<Words, std::string>>& engines) {
  std::vector<graph::TunedEngine> table;
  for (const auto& [words, engine] : engines) table.push_back({words, engine});
  graph::set_engine_table(static_cast<int>(sm_version), static_cast<size_t>(cudnn_version), table);
}

void set_norm_table(int64_t sm_version, int64_t cudnn_version,
                    const std::vector<NormEngine>& choices) {
  std::vector<NormChoice> table;
  for (const auto& [plan, is_layer, row_bytes, rows, is_faster, engine] : choices) {
    table.push_back({static_cast<NormPlan>(plan), is_layer, row_bytes, rows, is_faster, engine});
  }
  cudnn_ops::set_norm_table(static_cast<int>(sm_version), static_cast<size_t>(cudnn_version),
                            std::move(table));
}

void set_known_bad(const std::vector<KnownBad>& rules) {
  std::vector<graph::KnownBad> all;
  for (const auto& rule : rules) {
    all.push_back({rule.id, rule.plan, rule.cudnn, rule.sm, {}, rule.reason});
    for (const auto& [fact, comparison, value] : rule.when) {
      all.back().when.push_back({fact, comparison, value});
    }
  }
  graph::set_known_bad(std::move(all));
}

void set_context_parallel(bool active) {
  cudnn_ops::set_context_parallel(active);
}

bool set_computes_parts(bool computes) {
  return cudnn_ops::set_computes_parts(computes);
}

std::string known_bad(const Words& words, int64_t sm_version, int64_t cudnn_version) {
  return graph::known_bad(graph::PlanKey(words, 0), sm_version, cudnn_version);
}

void set_store(const std::string& folder, int64_t limit) {
  graph::PlanStore::global().set_folder(folder);
  graph::PlanStore::global().set_limit(limit);
}

StoreInfo store_info() {
  const auto info = graph::PlanStore::global().info();
  return {info.folder, info.refusal, info.files, info.bytes, info.limit};
}

int64_t store_clear() {
  return graph::PlanStore::global().clear();
}

std::tuple<bool, std::string, std::string> write_plan(const Words& words, const std::string& device,
                                                      const std::string& folder) {
  return graph::write_plan(words, device, folder);
}

void set_bundle(const std::string& path, int descriptor, const std::string& gpu,
                const std::vector<int64_t>& devices, const std::string& described,
                const std::vector<std::string>& names, const std::vector<int64_t>& offsets) {
  auto& bundles = graph::PlanBundles::global();
  if (names.empty()) {
    bundles.remove(path);
    return;
  }
  auto targets = devices;
  if (!described.empty()) targets.push_back(graph::Target::described(described).id());
  bundles.add(std::make_shared<graph::PlanBundle>(descriptor, path, gpu, std::move(targets), names,
                                                  offsets));
}

void set_cudnn_fallback_path(const std::string& path) {
  graph::set_fallback_path(path);
}

int64_t cudnn_version() {
  return static_cast<int64_t>(graph::cudnn().version);
}

std::string cudnn_path() {
  return graph::cudnn().path;
}

std::string describe_device(int64_t index) {
  return graph::describe_device(static_cast<int>(index));
}

}  // namespace cudnn_ops::api
