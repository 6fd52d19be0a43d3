// Everything of Target and Plan that needs the frontend: describing a GPU, building a plan.

#include "graph/cudnn_library.h"
#include "graph/error.h"
#include "graph/frontend.h"
#include "graph/plan.h"
#include "graph/target.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <future>
#include <mutex>
#include <sstream>
#include <string>
#include <system_error>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace cudnn_ops::graph {
namespace {

// Plans that are compiled at once.
constexpr int64_t kMaxThreads = 8;

// Empty where NVRTC can be loaded, with which cuDNN compiles kernels; else what is missing. Without
// it some engines say that they do not support the graph.
std::string missing_compiler() {
  const std::string name = "libnvrtc.so." + std::to_string(CUDART_VERSION / 1000);
  void* handle = dlopen(name.c_str(), RTLD_NOW);
  if (handle == nullptr) return "cannot load " + name + ", with which it compiles kernels";
  const bool is_whole = dlsym(handle, "nvrtcCompileProgram") != nullptr;
  dlclose(handle);
  return is_whole ? std::string() : name + ", with which it compiles kernels, has no compiler";
}

// Whether the frontend, or cuDNN behind it, does not support what it was given; else it failed. The
// last three codes stand for either: there the statuses in the report decide.
bool is_refusal(const fe::error_t& status) {
  switch (status.code) {
    case fe::error_code_t::ATTRIBUTE_NOT_SET:
    case fe::error_code_t::SHAPE_DEDUCTION_FAILED:
    case fe::error_code_t::INVALID_TENSOR_NAME:
    case fe::error_code_t::GRAPH_NOT_SUPPORTED:
    case fe::error_code_t::UNSUPPORTED_GRAPH_FORMAT:
    case fe::error_code_t::INVALID_VALUE: return true;
    case fe::error_code_t::HEURISTIC_QUERY_FAILED:
    case fe::error_code_t::GRAPH_EXECUTION_PLAN_CREATION_FAILED:
      return graph::is_refusal(status.err_msg, /*otherwise=*/true) && missing_compiler().empty();
    case fe::error_code_t::CUDNN_BACKEND_API_FAILED:
      return graph::is_refusal(status.err_msg, /*otherwise=*/false);
    default: return false;
  }
}

void require(const fe::error_t& status) {
  if (status.is_good()) return;
  const std::string reason = readable_reason(status.err_msg);
  if (is_refusal(status)) throw NotSupported(reason);
  const std::string missing = missing_compiler();
  throw CudnnError("cuDNN could not make a plan: " + (missing.empty() ? reason : missing));
}

// What became of the plans of a list, of which some may be refused and some may fail.
class Attempts {
 public:
  // Whether it was good; from any thread.
  bool add(const fe::error_t& status) {
    if (status.is_good()) return true;
    std::lock_guard<std::mutex> lock(mutex_);
    auto& first = is_refusal(status) ? refusal_ : failure_;
    if (first.is_good()) first = status;
    return false;
  }
  // The first failure's reason; empty without any, and only then.
  std::string why_one_failed() const {
    if (!failure_.is_bad()) return {};
    const std::string reason = readable_reason(failure_.err_msg);
    return reason.empty() ? "cuDNN gave no reason" : reason;
  }
  // None was good.
  [[noreturn]] void raise() const {
    require(failure_);
    require(refusal_);
    throw NotSupported("none of cuDNN's engines for this can be built");
  }

 private:
  std::mutex mutex_;
  fe::error_t refusal_, failure_;
};

int sm_version_of(const std::string& json) {
  try {
    return nlohmann::json::parse(json).at("deviceVer").get<int>() / 10;
  } catch (const nlohmann::json::exception& error) {
    throw NotSupported(error.what());
  }
}

}  // namespace

Target Target::live(int device, cudnnHandle_t handle, int sm_version, std::string gpu) {
  Target target;
  target.id_ = device;
  target.handle_ = handle;
  target.sm_version_ = sm_version;
  target.gpu_ = std::move(gpu);
  return target;
}

Target Target::described(const std::string& json) {
  cudnn();
  Target target;
  target.id_ = static_cast<int64_t>(std::hash<std::string>()(json) | uint64_t{1} << 63);
  target.sm_version_ = sm_version_of(json);
  target.description_ = json;
  target.gpu_ = "described: " + json;
  target.properties_ = std::make_shared<fe::DeviceProperties>();
  require(target.properties_->deserialize({json.begin(), json.end()}));
  return target;
}

std::string describe_device(int index) {
  cudnn();
  fe::DeviceProperties properties;
  require(properties.set_device_id(index).build());
  std::vector<uint8_t> json;
  require(properties.serialize(json));
  return {json.begin(), json.end()};
}

namespace {

// Index of the plan with that engine and those knobs, or -1.
int64_t find_engine(const FrontendGraph& graph, const std::string& engine) {
  for (int64_t i = 0; i < graph.get_execution_plan_count(); ++i) {
    std::string name;
    if (graph.get_plan_name_at_index(i, name).is_good() && name == engine) return i;
  }
  return -1;
}

// Puts an engine that the heuristics did not name at the end of the list, if cuDNN has it.
void add_engine(FrontendGraph& graph, const std::string& engine) {
  std::istringstream parts(engine);
  std::string part;
  std::getline(parts, part, '_');
  int id = 0, number = 0, value = 0;
  if (std::sscanf(part.c_str(), "eng%d", &id) != 1) return;
  std::unordered_map<fe::KnobType_t, int64_t> knobs;
  while (std::getline(parts, part, '_')) {
    if (std::sscanf(part.c_str(), "k%d=%d", &number, &value) != 2) return;
    knobs[fe::convert_from_backend_knob_type(static_cast<cudnnBackendKnobType_t>(number))] = value;
  }
  (void)graph.create_execution_plan(id, knobs);
}

// Everything up to the list of plans that cuDNN's heuristics offer, and of those with `engines`.
void list_plans(FrontendGraph& graph, const Target& target,
                const std::vector<fe::HeurMode_t>& modes, const std::vector<std::string>& engines) {
  require(graph.validate());
  require(graph.build_operation_graph(target.handle()));
  require(graph.create_execution_plans(modes));
  for (const auto& engine : engines) {
    if (find_engine(graph, engine) < 0) add_engine(graph, engine);
  }
  graph.deselect_numeric_notes(graph.refused());
}

// Indices of the plans, without those that the heuristics name once more.
std::vector<int64_t> distinct_plans(const FrontendGraph& graph) {
  std::vector<int64_t> indices;
  std::unordered_set<std::string> names;
  for (int64_t i = 0; i < graph.get_execution_plan_count(); ++i) {
    std::string name;
    if (graph.get_plan_name_at_index(i, name).is_good() && names.insert(name).second) {
      indices.push_back(i);
    }
  }
  return indices;
}

// How many of these plans have kernels that are still to be compiled, which takes up to 1 s.
int64_t compiled_plans(const FrontendGraph& graph, const std::vector<int64_t>& indices) {
  int64_t count = 0;
  std::vector<fe::BehaviorNote_t> notes;
  for (const int64_t i : indices) {
    count += graph.get_behavior_notes_for_plan_at_index(i, notes).is_good() &&
             std::find(notes.begin(), notes.end(), fe::BehaviorNote_t::RUNTIME_COMPILATION) !=
                 notes.end();
  }
  return count;
}

// What serialize() writes: these, then the frontend's own bytes.
struct Header {
  char magic[4];
  EngineChoice choice;
  uint8_t engine_size;
  uint16_t reserved;
  int64_t workspace_bytes;
  int64_t frontend_workspace;
};
constexpr char kMagic[4] = {'P', 'L', 'A', 'N'};

Header header_of(const std::string& bytes) {
  Header header;
  if (bytes.size() < sizeof header) throw CudnnError("these bytes are no plan");
  std::memcpy(&header, bytes.data(), sizeof header);
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0 ||
      header.choice > EngineChoice::kMeasured ||
      bytes.size() < sizeof header + header.engine_size) {
    throw CudnnError("these bytes are no plan");
  }
  return header;
}

}  // namespace

Plan::Plan(std::shared_ptr<FrontendGraph> graph, int64_t index)
    : graph_(std::move(graph)), index_(index), descriptor_(graph_->plan_descriptor(index)) {
  require(graph_->prepare_variant_pack_template());
  const auto& pack = graph_->varpack_template;
  uids_ = pack.all_uids;
  pointers_ = pack.template_ptrs;
  user_slots_ = pack.user_slots;
  workspace_slots_ = pack.workspace_slots;
  needs_frontend_ = graph_->has_frontend_kernels() || uids_.size() > kMaxTensors;
}

std::shared_ptr<Plan> Plan::of(std::shared_ptr<FrontendGraph> graph, int64_t index) {
  std::shared_ptr<Plan> plan(new Plan(std::move(graph), index));
  require(plan->graph_->get_plan_name_at_index(index, plan->engine_));
  require(plan->graph_->get_workspace_size_plan_at_index(index, plan->workspace_bytes_));
  plan->frontend_workspace_ = plan->graph_->frontend_workspace();
  return plan;
}

std::shared_ptr<const Plan> Plan::build(std::shared_ptr<FrontendGraph> graph, const Target& target,
                                        const std::string& engine) {
  const std::vector<std::string> engines(engine.empty() ? 0 : 1, engine);
  list_plans(*graph, target, {fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK}, engines);
  auto indices = distinct_plans(*graph);
  const int64_t wanted = engine.empty() ? -1 : find_engine(*graph, engine);
  std::stable_partition(indices.begin(), indices.end(), [&](int64_t i) { return i == wanted; });
  Attempts attempts;
  for (const int64_t index : indices) {
    if (!attempts.add(graph->build_plan_at_index(index))) continue;
    const auto plan = of(std::move(graph), index);
    plan->preferred_failed_ = attempts.why_one_failed();
    return plan;
  }
  attempts.raise();
}

std::vector<std::shared_ptr<const Plan>> Plan::build_all(
    c10::function_ref<std::shared_ptr<FrontendGraph>(const Target&)> make_graph,
    c10::function_ref<Target()> target_here, const std::vector<std::string>& more_engines) {
  const auto listed = [&](fe::HeurMode_t mode) {
    const Target target = target_here();
    auto graph = make_graph(target);
    if (graph != nullptr) list_plans(*graph, target, {mode}, more_engines);
    return graph;
  };
  auto mode = fe::HeurMode_t::A;
  std::shared_ptr<FrontendGraph> graph;
  try {
    graph = listed(mode);
    if (graph == nullptr) return {};
    require(graph->check_support());
  } catch (const NotSupported&) {
    mode = fe::HeurMode_t::FALLBACK;  // these are slow, and some of them take seconds to compile
    graph = listed(mode);
    require(graph->check_support());
  }
  const auto indices = distinct_plans(*graph);
  std::vector<std::shared_ptr<Plan>> built(indices.size());
  std::atomic<size_t> next = 0;
  Attempts attempts;
  const auto build_in_turn = [&](const std::shared_ptr<FrontendGraph>& here) {
    for (size_t i = next++; i < indices.size(); i = next++) {
      if (attempts.add(here->build_plan_at_index(indices[i]))) built[i] = of(here, indices[i]);
    }
  };
  // A graph builds one plan at a time: each thread has a graph of its own.
  std::vector<std::future<void>> helpers;
  try {
    for (int64_t i = 1; i < std::min(compiled_plans(*graph, indices), kMaxThreads); ++i) {
      helpers.push_back(std::async(std::launch::async, [&] { build_in_turn(listed(mode)); }));
    }
  } catch (const std::system_error&) {
    // As many threads as there may be: with fewer it takes longer.
  }
  build_in_turn(graph);
  for (auto& helper : helpers) helper.get();
  std::vector<std::shared_ptr<const Plan>> plans;
  for (const auto& plan : built) {
    if (plan == nullptr) continue;
    plan->preferred_failed_ = attempts.why_one_failed();
    plans.push_back(plan);
  }
  if (plans.empty()) attempts.raise();
  return plans;
}

void Plan::drop_rivals() const {
  graph_->keep_only(index_);
}

std::string Plan::serialize(EngineChoice choice) const {
  if (needs_frontend_) return {};
  std::vector<uint8_t> data;
  if (graph_->serialize_plan(index_, data).is_bad()) return {};
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.choice = choice;
  header.engine_size = static_cast<uint8_t>(std::min<size_t>(engine_.size(), 255));
  header.workspace_bytes = workspace_bytes_;
  header.frontend_workspace = frontend_workspace_;
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
  bytes.append(engine_, 0, header.engine_size);
  bytes.append(data.begin(), data.end());
  return bytes;
}

std::shared_ptr<const Plan> Plan::deserialize(const std::string& bytes, const Target& target,
                                              const std::string& origin) {
  const Header header = header_of(bytes);
  const size_t start = sizeof header + header.engine_size;
  auto graph = std::make_shared<FrontendGraph>();
  try {
    const std::vector<uint8_t> data(bytes.begin() + start, bytes.end());
    if (target.properties()) graph->set_device_properties(target.properties());
    // No warm-up: it would capture a CUDA graph on the caller's stream to load the kernels, which
    // the first execution loads anyway.
    auto status = target.properties()
                      ? graph->deserialize(data)
                      : graph->deserialize(target.handle(), data, /*enforce_precompiled=*/true,
                                           /*run_warmup=*/false);
    if (status.is_bad()) throw CudnnError("cuDNN cannot read this plan: " + status.get_message());
  } catch (const nlohmann::json::exception& error) {
    throw CudnnError(std::string("these bytes are no plan: ") + error.what());
  }
  std::shared_ptr<Plan> plan(new Plan(std::move(graph), 0));
  plan->origin_ = origin;
  plan->engine_ = bytes.substr(sizeof header, header.engine_size);
  plan->workspace_bytes_ = header.workspace_bytes;
  plan->frontend_workspace_ = header.frontend_workspace;
  return plan;
}

EngineChoice Plan::choice_in(const std::string& bytes) {
  return header_of(bytes).choice;
}

void Plan::execute_by_frontend(cudnnHandle_t handle, c10::ArrayRef<void*> pointers,
                               void* workspace) const {
  auto status = graph_->execute_plan_at_index(handle, const_cast<void**>(pointers.data()),
                                              static_cast<int>(pointers.size()), workspace, index_);
  if (status.is_bad()) throw CudnnError("cuDNN could not execute: " + status.get_message());
}

}  // namespace cudnn_ops::graph
