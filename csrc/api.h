// What may be asked of the operators' library: the only C++ symbols that it exports. Operators are
// reached through torch's dispatcher instead, and so is this from Python (api_operators.cpp).
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#define CUDNN_OPS_API __attribute__((visibility("default")))

namespace cudnn_ops::api {

struct CacheInfo {
  int64_t hits, builds, loads, evictions, size, limit;
};

struct StoreInfo {
  std::string folder, refusal;  // empty: off; why the folder is not used
  int64_t files, bytes, limit;
};

using Words = std::vector<int64_t>;  // a plan's key (graph/plan_key.h)

struct Versions {
  std::string torch;         // built against
  int64_t cudnn_headers;     // built against, 91900 for 9.19.0; 0 in a build without cuDNN
  int64_t frontend_headers;  // built against, 13200 for 1.32.0; 0 in a build without cuDNN
  bool with_cuda;            // whether the CUDA kernels are in this build
  std::string graphs;        // hash of the sources that say what plans' keys mean
};

CUDNN_OPS_API Versions versions();

// Who gets the library's warnings (graph/warn.h).
CUDNN_OPS_API void set_warner(void (*warner)(const char* message));

// The plan cache (graph/plan_cache.h). set_cache_limit throws std::invalid_argument.
CUDNN_OPS_API CacheInfo cache_info();
CUDNN_OPS_API void cache_clear();
CUDNN_OPS_API void set_cache_limit(int64_t limit);

// Recordings of the plans that calls ask for. stop_recording throws std::invalid_argument.
CUDNN_OPS_API int64_t start_recording();
CUDNN_OPS_API std::vector<Words> stop_recording(int64_t recording);

// One plan, by its key: what it is for, in words; making it (graph/device_query.h). Both throw
// std::invalid_argument for words that are no key.
CUDNN_OPS_API std::string describe_plan(const Words& words);
CUDNN_OPS_API std::tuple<bool, std::string, std::string, int64_t> make_plan(
    const Words& words, const std::string& device);

// The policy (graph/plan_policy.h): 0 auto, 1 exact, 2 polymorphic.
CUDNN_OPS_API int64_t policy();
CUDNN_OPS_API void set_policy(int64_t policy);
CUDNN_OPS_API int64_t promote_after();
CUDNN_OPS_API void set_promote_after(int64_t calls);
// 0 off, 1 once, 2 always.
CUDNN_OPS_API int64_t autotune();
CUDNN_OPS_API void set_autotune(int64_t autotune);
// What was measured since the last call: keys, and the milliseconds of each engine.
CUDNN_OPS_API std::vector<std::pair<Words, std::vector<std::pair<std::string, double>>>>
take_measurements();
CUDNN_OPS_API void set_engine_table(int64_t sm_version, int64_t cudnn_version,
                                    const std::vector<std::pair<Words, std::string>>& engines);
// Of norms (ops/norm_choice.h): the plan (0 inference, 1 training, 2 backward), whether it is of a
// layer norm, bytes of a row, rows, whether cuDNN is faster than our kernels, its fastest engine.
using NormEngine = std::tuple<int64_t, bool, int64_t, int64_t, bool, std::string>;
CUDNN_OPS_API void set_norm_table(int64_t sm_version, int64_t cudnn_version,
                                  const std::vector<NormEngine>& choices);

// What cuDNN is known to compute wrongly (graph/known_bad.h): rules, each with its conditions, and
// what one says of a plan. Both throw std::invalid_argument.
struct KnownBad {
  std::string id, plan;
  std::pair<int64_t, int64_t> cudnn, sm;
  std::vector<std::tuple<std::string, std::string, int64_t>> when;
  std::string reason;
};
CUDNN_OPS_API void set_known_bad(const std::vector<KnownBad>& rules);
CUDNN_OPS_API std::string known_bad(const Words& words, int64_t sm_version, int64_t cudnn_version);

// Whether torch's context_parallel is in force (ops/context_parallel.h).
CUDNN_OPS_API void set_context_parallel(bool active);
CUDNN_OPS_API bool set_computes_parts(bool computes);

// The store on disk (graph/plan_store.h).
CUDNN_OPS_API void set_store(const std::string& folder, int64_t limit);
CUDNN_OPS_API StoreInfo store_info();
CUDNN_OPS_API int64_t store_clear();

// Bundles of plans (graph/plan_bundle.h, plans/bundle.py). write_plan makes a record of one
// (graph/device_query.h); its file's name becomes the record's. A bundle serves the live GPUs in
// `devices` and, unless it is empty, the one that `described` describes; `gpu` is the description
// that its plans were made for. It takes the place of one of the same path, and without names there
// is none any more. Both throw std::invalid_argument.
CUDNN_OPS_API std::tuple<bool, std::string, std::string> write_plan(const Words& words,
                                                                    const std::string& device,
                                                                    const std::string& folder);
CUDNN_OPS_API void set_bundle(const std::string& path, int descriptor, const std::string& gpu,
                              const std::vector<int64_t>& devices, const std::string& described,
                              const std::vector<std::string>& names,
                              const std::vector<int64_t>& offsets);

// libcudnn (graph/cudnn_library.h). Those that load it throw std::runtime_error if they can't.
CUDNN_OPS_API void set_cudnn_fallback_path(const std::string& path);
CUDNN_OPS_API int64_t cudnn_version();
CUDNN_OPS_API std::string cudnn_path();
CUDNN_OPS_API std::string describe_device(int64_t index);

}  // namespace cudnn_ops::api
