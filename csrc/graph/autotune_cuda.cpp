#include "graph/autotune.h"

#include "graph/cuda_call.h"
#include "graph/error.h"

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <limits>

namespace cudnn_ops::graph {
namespace {

constexpr int kWarmUpCalls = 3;
constexpr int kSamples = 7;
constexpr int kCallsPerSample = 5;

constexpr double kNever = std::numeric_limits<double>::infinity();

float time_once(c10::function_ref<void()> run, int calls) {
  at::cuda::CUDAEvent begin(cudaEventDefault), end(cudaEventDefault);
  begin.record();
  for (int i = 0; i < calls; ++i) run();
  end.record();
  end.synchronize();
  return begin.elapsed_time(end);
}

// By `time` of what runs the plan; infinite where it builds and does not run.
double time_plan(const Plan& plan, c10::ArrayRef<void*> pointers,
                 double (*time)(c10::function_ref<void()>)) {
  const auto workspace = c10::cuda::CUDACachingAllocator::get()->allocate(plan.workspace_bytes());
  try {
    return time(
        [&] { plan.execute(thread_handle(), pointers, workspace.get(), /*capturing=*/false); });
  } catch (const CudnnError&) {
    return kNever;
  }
}

// The second call of two: enough to see which plans are out of the question.
double glance(c10::function_ref<void()> run) {
  run();
  return time_once(run, 1);
}

// Among dozens of plans some take ten times as long as others: those that a glance shows to be this
// much slower than the least are not timed again. What a single call's time may be wrong by is
// allowed for.
constexpr double kWorthTiming = 1.5;
constexpr double kGlanceErrorMs = 0.02;

}  // namespace

double time_calls(c10::function_ref<void()> run) {
  for (int i = 0; i < kWarmUpCalls; ++i) run();
  std::array<float, kSamples> times{};
  for (float& time : times) time = time_once(run, kCallsPerSample);
  std::nth_element(times.begin(), times.begin() + kSamples / 2, times.end());
  return times[kSamples / 2] / kCallsPerSample;
}

std::vector<double> time_plans(const Call& call, const std::vector<PlanPtr>& plans) {
  auto* allocator = c10::cuda::CUDACachingAllocator::get();
  c10::SmallVector<c10::DataPtr, 4> scratch;
  std::vector<void*> pointers = call.pointers.vec();
  for (const auto& [index, bytes] : call.written) {
    scratch.push_back(allocator->allocate(bytes));
    pointers[index] = scratch.back().get();
  }
  std::vector<double> times;
  for (const auto& plan : plans) times.push_back(time_plan(*plan, pointers, glance));
  if (times.empty()) return times;
  const double most = *std::min_element(times.begin(), times.end()) * kWorthTiming + kGlanceErrorMs;
  for (size_t i = 0; i < plans.size(); ++i) {
    if (times[i] <= most) times[i] = time_plan(*plans[i], pointers, time_calls);
  }
  return times;
}

}  // namespace cudnn_ops::graph
