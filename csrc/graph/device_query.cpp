#include "device_query.h"

#include "cuda_call.h"
#include "cudnn_library.h"
#include "error.h"

#include <c10/util/Exception.h>

namespace cudnn_ops::graph {
namespace {

Target target_of(const std::string& device) {
  if (device != "current") {
    try {
      return Target::described(device);
    } catch (const NotSupported& error) {
      TORCH_CHECK_VALUE(false, "cudnn_ops: this is not the description of a GPU that cuDNN ",
                        version_name(cudnn().version), " can read: ", error.what());
    }
  }
#ifdef CUDNN_OPS_WITH_CUDA
  return live_target();
#else
  throw CudnnError("this build has no CUDA: describe a GPU instead, such as device=\"h200\"");
#endif
}

}  // namespace

Answer ask(const std::string& device,
           c10::function_ref<std::shared_ptr<const Plan>(const Target&)> build_plan) {
  try {
    const Target target = target_of(device);
    const auto plan = build_plan(target);
    return {true, "", plan->engine(), plan->workspace_bytes()};
  } catch (const NotSupported& refusal) {
    return {false, refusal.what(), "", 0};
  } catch (const CudnnError& error) {
    TORCH_CHECK(false, "cudnn_ops: ", error.what());
  }
}

}  // namespace cudnn_ops::graph
