#include "graph/cuda_call.h"

#include "graph/autotune.h"
#include "graph/background_plans.h"
#include "graph/cudnn_library.h"
#include "graph/error.h"
#include "graph/plan_bundle.h"
#include "graph/plan_cache.h"
#include "graph/plan_policy.h"
#include "graph/plan_source.h"
#include "graph/profile_names.h"
#include "graph/warn.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cudnn/Handle.h>
#include <ATen/record_function.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

namespace cudnn_ops::graph {
namespace {

// The version of the driver and its kernel module.
std::string driver_name() {
  static const std::string name = [] {
    int version = 0;
    C10_CUDA_CHECK(cudaDriverGetVersion(&version));
    std::string line;
    std::ifstream file("/proc/driver/nvidia/version");
    std::getline(file, line);
    return std::to_string(version) + " " + line;
  }();
  return name;
}

std::string gpu_name(const cudaDeviceProp& properties) {
  std::ostringstream out;
  out << properties.name << ", sm " << properties.major << "." << properties.minor << ", "
      << properties.multiProcessorCount << " multiprocessors, L2 " << properties.l2CacheSize
      << ", driver " << driver_name();
  return out.str();
}

PlanPtr make(const Call& call, const PlanKey& key) {
  TORCH_CHECK(!is_capturing(), call.op,
              ": there is no plan for these shapes yet, and none can be built while a CUDA graph "
              "is captured; call the operator once with them before the capture, or build their "
              "plans with cudnn_ops.warmup");
  const Autotune autotune = PlanPolicy::global().autotune();
  const bool is_off = autotune == Autotune::kOff && !call.wants_autotune;
  if (is_off || call.written.empty()) return make_plan(key, live_target());
  const auto device = c10::cuda::current_device();
  const auto target_here = [device] {
    c10::cuda::set_device(device);  // a new thread starts with the first
    return live_target();
  };
  return make_measured_plan(
      key, target_here, /*again=*/autotune == Autotune::kAlways,
      [&](const std::vector<PlanPtr>& plans) { return time_plans(call, plans); });
}

PlanPtr find_or_make(const Call& call, const PlanKey& key) {
  try {
    return PlanCache::global().get(key, [&] { return make(call, key); });
  } catch (const CudnnError& error) {
    TORCH_CHECK(false, call.op, ": ", error.what());
  }
}

}  // namespace

bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

cudnnHandle_t thread_handle() {
  // A thread begins without a context. CUDA's runtime makes one current in calls that need it;
  // cuDNN loads and launches what it has compiled by the driver, which then fails (CUDA error 201).
  // The handle brings none along: torch gives threads those of threads that have ended.
  thread_local const bool has_context = [] {
    C10_CUDA_CHECK(c10::cuda::SetDevice(c10::cuda::current_device(), /*force=*/true));
    return true;
  }();
  (void)has_context;
  return at::native::getCudnnHandle();
}

Target live_target() {
  const auto* properties = at::cuda::getCurrentDeviceProperties();
  return Target::live(c10::cuda::current_device(), thread_handle(),
                      properties->major * 10 + properties->minor, gpu_name(*properties));
}

void require_sm80(const char* op, int index) {
  const auto* properties = at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(index));
  TORCH_CHECK_NOT_IMPLEMENTED(properties->major >= 8, op, ": cuda:", index, " (", properties->name,
                              ") has compute capability ", properties->major, ".",
                              properties->minor, "; cuDNN's kernels need 8.0 (A100) or newer");
}

PlanPtr ready_plan(const PlanKey& key) {
  if (PlanPolicy::global().policy() == Policy::kPolymorphic) return nullptr;
  return PlanCache::global().find(key);
}

namespace {

// Whether a plan that calls can do without for a while is made in the background. Not where engines
// are measured, for which it takes a call's tensors. Nor after a number of calls, or where torch is
// to be deterministic: results change by rounding with the plan, and do so at the same call in each
// run.
bool can_wait(bool wants_autotune) {
  const auto& policy = PlanPolicy::global();
  return policy.policy() == Policy::kAuto && policy.promote_after() == PlanPolicy::kByTime &&
         policy.autotune() == Autotune::kOff && !wants_autotune &&
         !at::globalContext().deterministicAlgorithms();
}

}  // namespace

void make_in_background(const PlanKey& key) {
  BackgroundPlans::global().make(key, [key] {
    // While another thread captures a CUDA graph, memory may be allocated and code be loaded in
    // this mode alone; in others that would end the capture. It stays with the thread, which drops
    // plans too.
    auto mode = cudaStreamCaptureModeRelaxed;
    C10_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
    c10::cuda::set_device(static_cast<c10::DeviceIndex>(key.target()));
    return make_plan(key, live_target());
  });
}

bool takes_polymorphic(const PlanKey& exact, const PlanKey& polymorphic, const PlanKey& family,
                       std::optional<double> lost) {
  auto& policy = PlanPolicy::global();
  if (is_capturing()) {
    return policy.policy() != Policy::kExact && PlanCache::global().contains(polymorphic);
  }
  const auto is_served = [&] {
    if (PlanCache::global().contains(polymorphic)) return true;
    // Reading a plan is quick, building one is not.
    const Target target = live_target();
    if (is_stored(exact, target)) return false;
    PlanBundles::global().find_for(target);
    return is_stored(polymorphic, target) && !is_stored(exact, target);
  };
  const Choice choice = policy.choose(exact, family, lost, is_served,
                                      [&] { return is_stored(exact, live_target()); });
  if (choice != Choice::kPromoted) return choice == Choice::kPolymorphic;
  if (!can_wait(/*wants_autotune=*/false)) return false;
  make_in_background(exact);
  return true;
}

PlanPtr polymorphic_plan(const Call& call, const PlanKey& polymorphic, const PlanKey& family) {
  try {
    return find_or_make(call, polymorphic);
  } catch (const NotSupported&) {
    PlanPolicy::global().refuse(family);
    return nullptr;
  }
}

PlanPtr get_plan(const Call& call, const PlanKey& key) {
  try {
    return find_or_make(call, key);
  } catch (const NotSupported& refusal) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, call.op, ": cuDNN ", version_name(cudnn().version),
                                " does not take this: ", refusal.what(), ". ", call.advice);
  }
}

PlanPtr plan_or_null(const Call& call, const PlanKey& key) {
  try {
    return find_or_make(call, key);
  } catch (const NotSupported&) {
    return nullptr;
  }
}

namespace {

// Whether the call makes the plan itself; where it can wait, it is made in the background.
bool makes_plan(const PlanKey& key, bool wants_autotune) {
  if (is_capturing()) return false;
  const auto is_at_hand = [&] { return any_stored() && is_stored(key, live_target()); };
  const Due due = PlanPolicy::global().due(key, is_at_hand);
  if (due != Due::kOften || !can_wait(wants_autotune)) return due != Due::kNo;
  make_in_background(key);
  return false;
}

}  // namespace

bool is_called_often(const PlanKey& key, bool wants_autotune) {
  if (PlanPolicy::global().policy() == Policy::kPolymorphic) return false;
  return PlanCache::global().contains(key) || makes_plan(key, wants_autotune);
}

PlanPtr often_called_plan(const Call& call, const PlanKey& key) {
  auto& policy = PlanPolicy::global();
  if (policy.policy() == Policy::kPolymorphic) return nullptr;
  if (auto plan = PlanCache::global().find(key)) return plan;
  if (!makes_plan(key, call.wants_autotune)) return nullptr;
  PlanPtr plan;
  try {
    plan = plan_or_null(call, key);
  } catch (const c10::Error& failure) {
    // Another kernel runs in its place.
    CUDNN_OPS_WARN_ONCE(failure.what_without_backtrace(),
                        "; cuDNN is not asked for this size again in this process");
  }
  if (plan == nullptr) policy.refuse(key);
  return plan;
}

namespace {

c10::DataPtr allocate_workspace(const Call& call, const Plan& plan) {
  const int64_t bytes = plan.workspace_bytes();
  if (bytes == 0) return {};
  try {
    return c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
  } catch (const c10::OutOfMemoryError& error) {
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, call.op, ": cuDNN's workspace for this takes ", bytes,
        " bytes, more than the GPU has free (before cuDNN 9.25 that of a deterministic "
        "backward on Hopper grows with the square of the length). ",
        error.what_without_backtrace());
  }
}

}  // namespace

void execute(const Call& call, const Plan& plan) {
  const auto workspace = allocate_workspace(call, plan);
  std::optional<at::RecordFunction> range;
  if (std::string name = profile_name(call.op, plan); !name.empty()) {
    range.emplace(at::RecordScope::USER_SCOPE);
    if (range->isActive()) range->before(std::move(name));
  }
  try {
    plan.execute(thread_handle(), call.pointers, workspace.get(), is_capturing());
  } catch (const CudnnError& error) {
    TORCH_CHECK(false, call.op, ": ", error.what());
  }
}

}  // namespace cudnn_ops::graph
