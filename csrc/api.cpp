// What Python (cudnn_ops/_C.py) asks and tells the library beside calling its operators: as
// operators without tensors, so that the library needs no Python to be built and serves every
// version of it. Tables, which schemas have no type for, come and go by their columns.

#include "ops/context_parallel.h"
#include "ops/linear/linear_choice.h"
#include "ops/norm/norm_choice.h"
#include "graph/background_plans.h"
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
#include "graph/profile_names.h"
#include "graph/target.h"
#include "graph/warn.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <cudnn_frontend_version.h>
#include <torch/library.h>
#include <torch/version.h>

#include <stdexcept>

// Read by cudnn_ops/_library.py before it loads the library: beside another torch that may fail.
// A note, because notes are the first that a library has in it.
__asm__(
    ".pushsection .note.cudnn_ops, \"a\", %note\n"
    ".balign 4\n"
    ".long 1f - 0f, 3f - 2f, 1\n"
    "0: .asciz \"cudnn_ops\"\n"
    "1: .balign 4\n"
    "2: .asciz \"built against torch " TORCH_VERSION
    "\"\n"
    "3: .balign 4\n"
    ".popsection\n");

namespace cudnn_ops {
namespace {

using Words = std::vector<int64_t>;  // a plan's key (graph/plan_key.h), or numbers of a row
using Rows = std::vector<Words>;
using Strings = std::vector<std::string>;

// What torch knows as no exception of its own would be a RuntimeError in Python.
template <auto function>
struct WithErrors;
template <class Result, class... Args, Result (*function)(Args...)>
struct WithErrors<function> {
  static Result call(Args... args) {
    try {
      return function(args...);
    } catch (const std::invalid_argument& error) {
      TORCH_CHECK_VALUE(false, error.what());
    }
  }
};
template <auto function>
constexpr auto with_errors = &WithErrors<function>::call;

// --- the library -------------------------------------------------------------------------

// Of torch, of cuDNN's and the frontend's headers (91900 for 9.19.0; 0 in a build without them);
// whether the CUDA kernels are in this build; the hash of what says what plans' keys mean.
std::tuple<std::string, int64_t, int64_t, bool, std::string> versions() {
#ifdef CUDNN_OPS_WITH_CUDA
  constexpr bool with_cuda = true;
#else
  constexpr bool with_cuda = false;
#endif
  return {TORCH_VERSION, CUDNN_VERSION, CUDNN_FRONTEND_VERSION, with_cuda, graph::graphs_version()};
}

// Its kernel is Python's, which torch calls with the GIL and whose exception it carries on. By no
// key, because modes that see every operator have no use for this one.
void warn_in_python(const char* message) {
  static const auto warn = c10::Dispatcher::singleton().findSchemaOrThrow("cudnn_ops::_warn", "");
  torch::jit::Stack stack{std::string(message)};
  warn.redispatchBoxed(c10::DispatchKeySet(), &stack);
}

// Its kernel is Python's too.
void find_packaged(const std::string& description) {
  static const auto find =
      c10::Dispatcher::singleton().findSchemaOrThrow("cudnn_ops::_find_packaged", "");
  torch::jit::Stack stack{description};
  find.redispatchBoxed(c10::DispatchKeySet(), &stack);
}

// A program that ends has no use for warnings, and Python that ends cannot give them.
void set_warns_in_python(bool is_running) {
  graph::set_warner(is_running ? warn_in_python : [](const char*) {});
}

void set_finds_packaged(bool is_running) {
  graph::PlanBundles::global().set_finder(is_running ? find_packaged : nullptr);
}

// --- plans -------------------------------------------------------------------------------

Words cache_info() {
  const auto info = graph::PlanCache::global().info();
  const auto background = graph::BackgroundPlans::global().info();
  return {info.hits,  info.builds,     info.loads,         info.evictions,   info.size,
          info.limit, background.made, background.pending, background.failed};
}

void cache_clear() {
  graph::BackgroundPlans::global().clear();  // first: nothing more comes of it
  graph::PlanCache::global().clear();
  graph::PlanPolicy::global().clear();
}

void set_cache_limit(int64_t limit) {
  graph::PlanCache::global().set_limit(limit);
}

int64_t start_recording() {
  return graph::PlanCache::global().start_recording();
}

Rows stop_recording(int64_t recording) {
  Rows result;
  for (const auto& key : graph::PlanCache::global().stop_recording(recording)) {
    result.push_back(key.words().vec());
  }
  return result;
}

std::string describe_plan(const Words& words) {
  const graph::PlanKey key(words, 0);
  return graph::kind_of(key).describe(key);
}

graph::Answer make_plan(const Words& words, const std::string& device) {
  return graph::ask(words, device);
}

void make_plan_in_background(const Words& words, const std::string& device) {
  graph::make_in_background(words, device);
}

std::tuple<std::string, std::string, int64_t, int64_t, int64_t> store_info() {
  const auto info = graph::PlanStore::global().info();
  return {info.folder, info.refusal, info.files, info.bytes, info.limit};
}

void set_store(const std::string& folder, int64_t limit) {
  graph::PlanStore::global().set_folder(folder);
  graph::PlanStore::global().set_limit(limit);
}

graph::Written write_plan(const Words& words, const std::string& device,
                          const std::string& folder) {
  return graph::write_plan(words, device, folder);
}

// A bundle (graph/plan_bundle.h, plans/bundle.py) serves the live GPUs in `devices` and, unless it
// is empty, the one that `described` describes; `gpu` is the description that its plans were made
// for, `label` what their source is called. It takes the place of one of the same path, and without
// names there is none any more.
void set_bundle(const std::string& path, int64_t descriptor, const std::string& label,
                const std::string& gpu, const Words& devices, const std::string& described,
                const Strings& names, const Rows& pieces) {
  auto& bundles = graph::PlanBundles::global();
  if (names.empty()) {
    bundles.remove(path);
    return;
  }
  auto targets = devices;
  if (!described.empty()) targets.push_back(graph::Target::described(described).id());
  bundles.add(std::make_shared<graph::PlanBundle>(static_cast<int>(descriptor), path, label, gpu,
                                                  std::move(targets), names, pieces));
}

// --- what was measured, and what is wrong ------------------------------------------------

std::tuple<Rows, std::vector<Strings>, std::vector<std::vector<double>>> take_measurements() {
  std::tuple<Rows, std::vector<Strings>, std::vector<std::vector<double>>> columns;
  auto& [keys, engines, times] = columns;
  for (const auto& [words, measured] : graph::take_measurements()) {
    keys.push_back(words);
    engines.emplace_back();
    times.emplace_back();
    for (const auto& [engine, ms] : measured) {
      engines.back().push_back(engine);
      times.back().push_back(ms);
    }
  }
  return columns;
}

void set_engine_table(int64_t sm_version, int64_t cudnn_version, const Rows& keys,
                      const Strings& engines) {
  std::vector<graph::TunedEngine> table;
  for (size_t i = 0; i < keys.size(); ++i) table.push_back({keys[i], engines.at(i)});
  graph::set_engine_table(static_cast<int>(sm_version), static_cast<size_t>(cudnn_version), table);
}

// The columns of a choice: the plan (a NormPlan), whether it is of a layer norm, bytes of a row,
// rows, whether cuDNN is faster than our kernels.
void set_norm_choices(int64_t sm_version, int64_t cudnn_version, const Rows& choices,
                      const Strings& engines) {
  std::vector<NormChoice> table;
  for (size_t i = 0; i < choices.size(); ++i) {
    const auto& choice = choices[i];
    table.push_back({static_cast<NormPlan>(choice.at(0)), choice.at(1) != 0, choice.at(2),
                     choice.at(3), choice.at(4) != 0, engines.at(i)});
  }
  cudnn_ops::set_norm_table(static_cast<int>(sm_version), static_cast<size_t>(cudnn_version),
                            std::move(table));
}

// The columns of a choice: the step (a LinearStep), the activation, rows, columns, depth, the
// fastest LinearEngine, and whether cuDNN's graph is faster; and the fastest engine of that.
void set_linear_choices(int64_t sm_version, int64_t cudnn_version, const Rows& choices,
                        const Strings& plan_engines) {
  std::vector<LinearChoice> table;
  for (size_t i = 0; i < choices.size(); ++i) {
    const auto& choice = choices[i];
    table.push_back({{static_cast<LinearStep>(choice.at(0)), slope_at(choice.at(1)), choice.at(2),
                      choice.at(3), choice.at(4)},
                     static_cast<LinearEngine>(choice.at(5)),
                     choice.at(6) != 0,
                     plan_engines.at(i)});
  }
  set_linear_table(static_cast<int>(sm_version), static_cast<size_t>(cudnn_version),
                   std::move(table));
}

void set_known_bad(const Strings& ids, const Strings& plans, const Rows& versions,
                   const std::vector<Strings>& facts, const std::vector<Strings>& comparisons,
                   const Rows& values, const Strings& reasons) {
  std::vector<graph::KnownBad> rules;
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto& range = versions.at(i);
    rules.push_back({ids[i],
                     plans.at(i),
                     {range.at(0), range.at(1)},
                     {range.at(2), range.at(3)},
                     {},
                     reasons.at(i)});
    for (size_t k = 0; k < facts.at(i).size(); ++k) {
      rules.back().when.push_back({facts[i][k], comparisons.at(i).at(k), values.at(i).at(k)});
    }
  }
  graph::set_known_bad(std::move(rules));
}

std::string known_bad(const Words& words, int64_t sm_version, int64_t cudnn_version) {
  return graph::known_bad(graph::PlanKey(words, 0), sm_version, cudnn_version);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  m.def("_versions() -> (str, int, int, bool, str)", versions);
  m.def("_warn(str message) -> ()");
  m.def("_set_warns_in_python(bool is_running) -> ()", set_warns_in_python);
  m.def("_find_packaged(str description) -> ()");
  m.def("_set_finds_packaged(bool is_running) -> ()", set_finds_packaged);
  m.def("_set_context_parallel(bool active) -> ()", set_context_parallel);
  m.def("_set_computes_parts(bool computes) -> bool", set_computes_parts);

  // libcudnn (graph/cudnn_library.h). Those that load it raise RuntimeError if they can't.
  m.def("_set_cudnn_fallback_path(str path) -> ()", graph::set_fallback_path);
  m.def("_load_ahead() -> ()", graph::load_ahead);
  m.def("_cudnn_version() -> int", [] { return static_cast<int64_t>(graph::cudnn().version); });
  m.def("_cudnn_path() -> str", [] { return std::string(graph::cudnn().path); });
  m.def("_describe_device(int index) -> str",
        [](int64_t index) { return graph::describe_device(static_cast<int>(index)); });

  m.def("_cache_info() -> int[]", cache_info);
  m.def("_cache_clear() -> ()", cache_clear);
  m.def("_set_cache_limit(int limit) -> ()", with_errors<set_cache_limit>);
  m.def("_start_recording() -> int", start_recording);
  m.def("_stop_recording(int recording) -> int[][]", with_errors<stop_recording>);
  m.def("_describe_plan(int[] words) -> str", with_errors<describe_plan>);
  m.def("_make_plan(int[] words, str device) -> (bool, str, str, int, str)",
        with_errors<make_plan>);
  m.def("_make_plan_in_background(int[] words, str device) -> ()",
        with_errors<make_plan_in_background>);
  m.def("_wait_for_plans() -> ()", [] { graph::BackgroundPlans::global().wait(); });
  m.def("_stop_background() -> ()", [] { graph::BackgroundPlans::global().stop(); });
  m.def("_set_store(str folder, int limit) -> ()", set_store);
  m.def("_store_info() -> (str, str, int, int, int)", store_info);
  m.def("_store_clear() -> int", [] { return graph::PlanStore::global().clear(); });
  m.def("_write_plan(int[] words, str device, str folder) -> (bool, str, str)",
        with_errors<write_plan>);
  m.def(
      "_set_bundle(str path, int descriptor, str label, str gpu, int[] devices, str described, "
      "str[] names, int[][] pieces) -> ()",
      with_errors<set_bundle>);

  // graph/plan_policy.h: 0 auto, 1 exact, 2 polymorphic; and 0 off, 1 once, 2 always.
  using graph::PlanPolicy;
  m.def("_policy() -> int", [] { return static_cast<int64_t>(PlanPolicy::global().policy()); });
  m.def("_set_policy(int policy) -> ()", [](int64_t policy) {
    PlanPolicy::global().set_policy(static_cast<graph::Policy>(policy));
  });
  m.def("_promote_after() -> int", [] { return PlanPolicy::global().promote_after(); });
  m.def("_set_promote_after(int calls) -> ()",
        [](int64_t calls) { PlanPolicy::global().set_promote_after(calls); });  // -1: by time
  m.def("_autotune() -> int", [] { return static_cast<int64_t>(PlanPolicy::global().autotune()); });
  m.def("_set_autotune(int autotune) -> ()", [](int64_t autotune) {
    PlanPolicy::global().set_autotune(static_cast<graph::Autotune>(autotune));
  });

  // graph/profile_names.h: 0 none, 1 the engine, 2 the whole plan.
  m.def("_set_profile_names(int names) -> ()",
        [](int64_t names) { graph::set_profile_names(static_cast<graph::ProfileNames>(names)); });

  m.def("_take_measurements() -> (int[][], str[][], float[][])", take_measurements);
  m.def("_set_engine_table(int sm_version, int cudnn_version, int[][] keys, str[] engines) -> ()",
        set_engine_table);
  m.def("_set_norm_table(int sm_version, int cudnn_version, int[][] choices, str[] engines) -> ()",
        set_norm_choices);
  m.def(
      "_set_linear_table(int sm_version, int cudnn_version, int[][] choices, str[] plan_engines) "
      "-> ()",
      set_linear_choices);
  m.def(
      "_set_known_bad(str[] ids, str[] plans, int[][] versions, str[][] facts, "
      "str[][] comparisons, int[][] values, str[] reasons) -> ()",
      with_errors<set_known_bad>);
  m.def("_known_bad(int[] words, int sm_version, int cudnn_version) -> str",
        with_errors<known_bad>);
}

}  // namespace cudnn_ops
