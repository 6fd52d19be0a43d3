// Everything of Target and Plan that needs the frontend: describing a GPU, building a plan.

#include "cudnn_library.h"
#include "error.h"
#include "frontend.h"
#include "plan.h"
#include "target.h"

#include <string>
#include <vector>

namespace cudnn_ops::graph {
namespace {

void require(fe::error_t status) {
  if (status.is_bad()) throw NotSupported(readable_reason(status.get_message()));
}

int sm_version_of(const std::string& json) {
  try {
    return nlohmann::json::parse(json).at("deviceVer").get<int>() / 10;
  } catch (const nlohmann::json::exception& error) {
    throw NotSupported(error.what());
  }
}

}  // namespace

Target Target::live(int device, cudnnHandle_t handle, int sm_version) {
  Target target;
  target.id_ = device;
  target.handle_ = handle;
  target.sm_version_ = sm_version;
  return target;
}

Target Target::described(const std::string& json) {
  cudnn();
  Target target;
  target.id_ = static_cast<int64_t>(std::hash<std::string>()(json) | uint64_t{1} << 63);
  target.sm_version_ = sm_version_of(json);
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

std::shared_ptr<const Plan> Plan::build(std::shared_ptr<FrontendGraph> graph,
                                        const Target& target) {
  require(graph->validate());
  require(graph->build_operation_graph(target.handle()));
  require(graph->create_execution_plans({fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK}));
  require(graph->check_support());
  require(graph->build_plans(fe::BuildPlanPolicy_t::HEURISTICS_CHOICE));

  std::shared_ptr<Plan> plan(new Plan());
  require(graph->get_plan_name(plan->engine_));
  require(graph->get_workspace_size(plan->workspace_bytes_));
  plan->descriptor_ = graph->plan_descriptor();
  require(graph->prepare_variant_pack_template());
  const auto& pack = graph->varpack_template;
  plan->uids_ = pack.all_uids;
  plan->pointers_ = pack.template_ptrs;
  plan->user_slots_ = pack.user_slots;
  plan->workspace_slots_ = pack.workspace_slots;
  plan->frontend_workspace_ = graph->frontend_workspace();
  plan->needs_frontend_ = graph->has_frontend_kernels() || pack.all_uids.size() > kMaxTensors;
  plan->frontend_execute_ = [graph = std::move(graph)](cudnnHandle_t handle, void** pointers,
                                                       int count, void* workspace) {
    auto status = graph->execute(handle, pointers, count, workspace);
    if (status.is_bad()) throw CudnnError("cuDNN could not execute: " + status.get_message());
  };
  return plan;
}

}  // namespace cudnn_ops::graph
