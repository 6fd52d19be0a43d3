#include "graph/device_query.h"

#include "graph/background_plans.h"
#include "graph/cuda_call.h"
#include "graph/cudnn_library.h"
#include "graph/error.h"
#include "graph/plan_cache.h"
#include "graph/plan_record.h"
#include "graph/plan_source.h"
#include "graph/target.h"

#include <fstream>
#include <stdexcept>

namespace cudnn_ops::graph {
namespace {

Target target_of(const std::string& device) {
  if (device != "current") {
    try {
      return Target::described(device);
    } catch (const NotSupported& error) {
      throw std::invalid_argument("cudnn_ops: this is not the description of a GPU that cuDNN " +
                                  version_name(cudnn().version) + " can read: " + error.what());
    }
  }
#ifdef CUDNN_OPS_WITH_CUDA
  return live_target();
#else
  throw CudnnError("this build has no CUDA: describe a GPU instead, such as device=\"h200\"");
#endif
}

}  // namespace

Answer ask(c10::ArrayRef<int64_t> words, const std::string& device) {
  try {
    const Target target = target_of(device);
    const PlanKey key(words, target.id());
    const auto plan = PlanCache::global().get(key, [&] { return make_plan(key, target); });
    return {true, "", plan->engine(), plan->workspace_bytes(), plan->origin()};
  } catch (const NotSupported& refusal) {
    return {false, refusal.what(), "", 0, ""};
  } catch (const CudnnError& error) {
    throw CudnnError(std::string("cudnn_ops: ") + error.what());
  }
}

void make_in_background(c10::ArrayRef<int64_t> words, const std::string& device) {
  try {
    const Target target = target_of(device);
    const PlanKey key(words, target.id());
#ifdef CUDNN_OPS_WITH_CUDA
    if (target.handle() != nullptr) return make_in_background(key);
#endif
    BackgroundPlans::global().make(key, [key, target] { return make_plan(key, target); });
  } catch (const CudnnError& error) {
    throw CudnnError(std::string("cudnn_ops: ") + error.what());
  }
}

Written write_plan(c10::ArrayRef<int64_t> words, const std::string& device,
                   const std::string& folder) {
  try {
    const Target target = target_of(device);
    const PlanKey key(words, target.id());
    std::string why_not;
    const std::string plan = make_plan_bytes(key, target, why_not);
    if (plan.empty()) return {true, why_not, ""};
    const std::string identity = identity_of(key, device);
    const std::string name = name_of(identity);
    std::ofstream file(folder + "/" + name, std::ios::binary);
    const std::string record = make_record(identity, plan);
    file.write(record.data(), static_cast<std::streamsize>(record.size()));
    file.close();
    if (!file) throw CudnnError("a plan could not be written to " + folder);
    return {true, "", name};
  } catch (const NotSupported& refusal) {
    return {false, refusal.what(), ""};
  } catch (const CudnnError& error) {
    throw CudnnError(std::string("cudnn_ops: ") + error.what());
  }
}

}  // namespace cudnn_ops::graph
