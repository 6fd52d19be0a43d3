#include "cuda_call.h"

#include "cudnn_library.h"
#include "error.h"
#include "plan_cache.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cudnn/Handle.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/util/Exception.h>

namespace cudnn_ops::graph {
namespace {

bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

}  // namespace

Target live_target() {
  const auto* properties = at::cuda::getCurrentDeviceProperties();
  return Target::live(c10::cuda::current_device(), at::native::getCudnnHandle(),
                      properties->major * 10 + properties->minor);
}

void require_sm80(const char* op, int index) {
  const auto* properties = at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(index));
  TORCH_CHECK_NOT_IMPLEMENTED(properties->major >= 8, op, ": cuda:", index, " (", properties->name,
                              ") has compute capability ", properties->major, ".",
                              properties->minor, "; cuDNN's kernels need 8.0 (A100) or newer");
}

void run_plan(const char* op, const PlanKey& key,
              c10::function_ref<std::shared_ptr<const Plan>(const Target&)> build_plan,
              c10::ArrayRef<void*> pointers, const char* advice) {
  try {
    const bool capturing = is_capturing();
    const auto plan = PlanCache::global().get(key, [&] {
      TORCH_CHECK(!capturing, op,
                  ": there is no plan for these shapes yet, and none can be built while a CUDA "
                  "graph is captured; call the operator once with them before the capture");
      return build_plan(live_target());
    });
    const int64_t bytes = plan->workspace_bytes();
    const auto workspace =
        bytes == 0 ? c10::DataPtr() : c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
    plan->execute(at::native::getCudnnHandle(), pointers, workspace.get(), capturing);
  } catch (const NotSupported& refusal) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, op, ": cuDNN ", version_name(cudnn().version),
                                " does not take this: ", refusal.what(), ". ", advice);
  } catch (const CudnnError& error) {
    TORCH_CHECK(false, op, ": ", error.what());
  }
}

}  // namespace cudnn_ops::graph
