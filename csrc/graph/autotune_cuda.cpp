#include "graph/autotune.h"

#include "graph/error.h"

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cudnn/Handle.h>
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

double median_ms(const Plan& plan, c10::ArrayRef<void*> pointers) {
  const auto workspace = c10::cuda::CUDACachingAllocator::get()->allocate(plan.workspace_bytes());
  return time_calls([&] {
    plan.execute(at::native::getCudnnHandle(), pointers, workspace.get(), /*capturing=*/false);
  });
}

}  // namespace

double time_calls(c10::function_ref<void()> run) {
  const auto repeat = [&](int calls) {
    for (int i = 0; i < calls; ++i) run();
  };
  repeat(kWarmUpCalls);
  std::array<float, kSamples> times{};
  for (float& time : times) {
    at::cuda::CUDAEvent begin(cudaEventDefault), end(cudaEventDefault);
    begin.record();
    repeat(kCallsPerSample);
    end.record();
    end.synchronize();
    time = begin.elapsed_time(end);
  }
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
  for (const auto& plan : plans) {
    try {
      times.push_back(median_ms(*plan, pointers));
    } catch (const CudnnError&) {  // it builds and does not run
      times.push_back(std::numeric_limits<double>::infinity());
    }
  }
  return times;
}

}  // namespace cudnn_ops::graph
