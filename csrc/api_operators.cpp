// api.h as operators, for cudnn_ops/_C.py: so the library needs no Python to be built, and serves
// every version of it. Tables, which schemas have no type for, come and go by their columns.

#include "api.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <stdexcept>

namespace cudnn_ops {
namespace {

using Strings = std::vector<std::string>;
using Rows = std::vector<api::Words>;

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

// Its kernel is Python's, which torch calls with the GIL and whose exception it carries on. By no
// key, because modes that see every operator have no use for this one.
void warn_in_python(const char* message) {
  static const auto warn = c10::Dispatcher::singleton().findSchemaOrThrow("cudnn_ops::_warn", "");
  torch::jit::Stack stack{std::string(message)};
  warn.redispatchBoxed(c10::DispatchKeySet(), &stack);
}

// A program that ends has no use for warnings, and Python that ends cannot give them.
void set_warns_in_python(bool is_running) {
  api::set_warner(is_running ? warn_in_python : [](const char*) {});
}

std::tuple<std::string, int64_t, int64_t, bool, std::string> versions() {
  const auto versions = api::versions();
  return {versions.torch, versions.cudnn_headers, versions.frontend_headers, versions.with_cuda,
          versions.graphs};
}

std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t> cache_info() {
  const auto info = api::cache_info();
  return {info.hits, info.builds, info.loads, info.evictions, info.size, info.limit};
}

std::tuple<std::string, std::string, int64_t, int64_t, int64_t> store_info() {
  const auto info = api::store_info();
  return {info.folder, info.refusal, info.files, info.bytes, info.limit};
}

std::tuple<Rows, std::vector<Strings>, std::vector<std::vector<double>>> take_measurements() {
  std::tuple<Rows, std::vector<Strings>, std::vector<std::vector<double>>> columns;
  auto& [keys, engines, times] = columns;
  for (const auto& [words, measured] : api::take_measurements()) {
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
  std::vector<std::pair<api::Words, std::string>> table;
  for (size_t i = 0; i < keys.size(); ++i) table.emplace_back(keys[i], engines.at(i));
  api::set_engine_table(sm_version, cudnn_version, table);
}

void set_norm_table(int64_t sm_version, int64_t cudnn_version, const Rows& choices,
                    const Strings& engines) {
  std::vector<api::NormEngine> table;
  for (size_t i = 0; i < choices.size(); ++i) {
    const auto& choice = choices[i];
    table.emplace_back(choice.at(0), choice.at(1) != 0, choice.at(2), choice.at(3),
                       choice.at(4) != 0, engines.at(i));
  }
  api::set_norm_table(sm_version, cudnn_version, table);
}

void set_known_bad(const Strings& ids, const Strings& plans, const Rows& versions,
                   const std::vector<Strings>& facts, const std::vector<Strings>& comparisons,
                   const Rows& values, const Strings& reasons) {
  std::vector<api::KnownBad> rules;
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto& range = versions.at(i);
    rules.push_back({ids[i],
                     plans.at(i),
                     {range.at(0), range.at(1)},
                     {range.at(2), range.at(3)},
                     {},
                     reasons.at(i)});
    for (size_t k = 0; k < facts.at(i).size(); ++k) {
      rules.back().when.emplace_back(facts[i][k], comparisons.at(i).at(k), values.at(i).at(k));
    }
  }
  api::set_known_bad(rules);
}

void set_bundle(const std::string& path, int64_t descriptor, const std::string& gpu,
                const api::Words& devices, const std::string& described, const Strings& names,
                const api::Words& offsets) {
  with_errors<api::set_bundle>(path, static_cast<int>(descriptor), gpu, devices, described, names,
                               offsets);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  m.def("_warn(str message) -> ()");
  m.def("_set_warns_in_python(bool is_running) -> ()", set_warns_in_python);
  m.def("_versions() -> (str, int, int, bool, str)", versions);

  m.def("_cache_info() -> (int, int, int, int, int, int)", cache_info);
  m.def("_cache_clear() -> ()", api::cache_clear);
  m.def("_set_cache_limit(int limit) -> ()", with_errors<api::set_cache_limit>);
  m.def("_start_recording() -> int", api::start_recording);
  m.def("_stop_recording(int recording) -> int[][]", with_errors<api::stop_recording>);
  m.def("_describe_plan(int[] words) -> str", with_errors<api::describe_plan>);
  m.def("_make_plan(int[] words, str device) -> (bool, str, str, int)",
        with_errors<api::make_plan>);

  m.def("_policy() -> int", api::policy);
  m.def("_set_policy(int policy) -> ()", api::set_policy);
  m.def("_promote_after() -> int", api::promote_after);
  m.def("_set_promote_after(int calls) -> ()", api::set_promote_after);
  m.def("_autotune() -> int", api::autotune);
  m.def("_set_autotune(int autotune) -> ()", api::set_autotune);
  m.def("_take_measurements() -> (int[][], str[][], float[][])", take_measurements);
  m.def("_set_engine_table(int sm_version, int cudnn_version, int[][] keys, str[] engines) -> ()",
        set_engine_table);
  m.def("_set_norm_table(int sm_version, int cudnn_version, int[][] choices, str[] engines) -> ()",
        set_norm_table);

  m.def(
      "_set_known_bad(str[] ids, str[] plans, int[][] versions, str[][] facts, "
      "str[][] comparisons, int[][] values, str[] reasons) -> ()",
      with_errors<set_known_bad>);
  m.def("_known_bad(int[] words, int sm_version, int cudnn_version) -> str",
        with_errors<api::known_bad>);
  m.def("_set_context_parallel(bool active) -> ()", api::set_context_parallel);
  m.def("_set_computes_parts(bool computes) -> bool", api::set_computes_parts);

  m.def("_set_store(str folder, int limit) -> ()", api::set_store);
  m.def("_store_info() -> (str, str, int, int, int)", store_info);
  m.def("_store_clear() -> int", api::store_clear);
  m.def("_write_plan(int[] words, str device, str folder) -> (bool, str, str)",
        with_errors<api::write_plan>);
  m.def(
      "_set_bundle(str path, int descriptor, str gpu, int[] devices, str described, str[] names, "
      "int[] offsets) -> ()",
      set_bundle);

  m.def("_set_cudnn_fallback_path(str path) -> ()", api::set_cudnn_fallback_path);
  m.def("_cudnn_version() -> int", api::cudnn_version);
  m.def("_cudnn_path() -> str", api::cudnn_path);
  m.def("_describe_device(int index) -> str", api::describe_device);
}

}  // namespace cudnn_ops
