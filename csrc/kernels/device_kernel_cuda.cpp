#include "kernels/device_kernel.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>
#include <mutex>

namespace cudnn_ops {
namespace {

std::atomic<int64_t> most_shared_bytes = 0;

cudaLaunchAttribute cluster_of(int blocks) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(blocks);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return attribute;
}

}  // namespace

DeviceLimits current_limits() {
  const auto* properties = at::cuda::getCurrentDeviceProperties();
  const auto there = static_cast<int64_t>(properties->sharedMemPerBlockOptin);
  const int64_t most = most_shared_bytes.load(std::memory_order_relaxed);
  return {properties->major * 10 + properties->minor, properties->multiProcessorCount,
          most == 0 ? there : std::min(there, most)};
}

void limit_shared_memory(int64_t bytes) {
  most_shared_bytes = bytes;
}

const void* DeviceKernel::function() const {
  const auto* properties = at::cuda::getCurrentDeviceProperties();
  const int major = properties->major;
  auto& function = functions_.at(static_cast<size_t>(major));
  if (const void* known = function.load(std::memory_order_acquire)) return known;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (function == nullptr) {
    constexpr int kLeastMajor = 8;
    TORCH_CHECK_NOT_IMPLEMENTED(major >= kLeastMajor, "cudnn_ops: ", properties->name,
                                " has compute capability ", major, ".", properties->minor,
                                "; the kernels need 8.0 (A100) or newer");
    const KernelImage* image = images_;
    while (image->major != 0 && image->major != major) ++image;
    cudaLibrary_t library = nullptr;
    C10_CUDA_CHECK(
        cudaLibraryLoadData(&library, image->data, nullptr, nullptr, 0, nullptr, nullptr, 0));
    cudaKernel_t kernel = nullptr;
    C10_CUDA_CHECK(cudaLibraryGetKernel(&kernel, library, name_));
    function = kernel;
  }
  return function;
}

void DeviceKernel::allow(int shared_bytes) const {
  // Up to 48 KiB, including what the kernel declares, a block gets without asking.
  constexpr int kUnasked = 32 << 10;
  if (shared_bytes <= kUnasked) return;
  // To ask takes a third of a launch's time.
  const auto device = static_cast<uint64_t>(c10::cuda::current_device()) << 32;
  const uint64_t needed = device | static_cast<uint64_t>(shared_bytes);
  const auto is_allowed = [&] {
    const uint64_t allowed = allowed_.load(std::memory_order_acquire);
    return allowed >> 32 == needed >> 32 && allowed >= needed;
  };
  if (is_allowed()) return;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (is_allowed()) return;
  C10_CUDA_CHECK(
      cudaFuncSetAttribute(function(), cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  allowed_.store(needed, std::memory_order_release);
}

void DeviceKernel::launch(int64_t blocks, int rows, int threads, void** arguments, int shared_bytes,
                          int cluster) const {
  TORCH_CHECK_VALUE(blocks <= std::numeric_limits<int32_t>::max(), name_, ": too many tokens");
  allow(shared_bytes);
  cudaLaunchAttribute attributes[3]{};
  unsigned count = 0;
  if (starts_early_ && at::cuda::getCurrentDeviceProperties()->major >= 9) {
    auto& early = attributes[count++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  if (is_cooperative_) {
    auto& cooperative = attributes[count++];
    cooperative.id = cudaLaunchAttributeCooperative;
    cooperative.val.cooperative = 1;
  }
  if (cluster > 1) attributes[count++] = cluster_of(cluster);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(rows));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = c10::cuda::getCurrentCUDAStream();
  config.attrs = attributes;
  config.numAttrs = count;
  C10_CUDA_CHECK(cudaLaunchKernelExC(&config, function(), arguments));
}

int64_t DeviceKernel::resident_blocks(int threads, int shared_bytes) const {
  constexpr int kCountBits = 8;
  const auto device = static_cast<uint64_t>(c10::cuda::current_device());
  const uint64_t asked =
      (device << 48 | static_cast<uint64_t>(threads) << 32 | static_cast<uint64_t>(shared_bytes))
      << kCountBits;
  uint64_t known = resident_.load(std::memory_order_relaxed);
  if (known >> kCountBits << kCountBits != asked) {
    allow(shared_bytes);
    int blocks = 0;
    C10_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &blocks, function(), threads, static_cast<size_t>(shared_bytes)));
    known = asked | static_cast<uint64_t>(blocks);
    resident_.store(known, std::memory_order_relaxed);
  }
  const auto per_processor = static_cast<int64_t>(known & ((1U << kCountBits) - 1));
  return per_processor * at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
}

int64_t DeviceKernel::resident_clusters(int threads, int shared_bytes, int cluster) const {
  constexpr int kCountBits = 16;
  const auto device = static_cast<uint64_t>(c10::cuda::current_device());
  const uint64_t asked =
      (device << 32 | static_cast<uint64_t>(threads) << 20 | static_cast<uint64_t>(shared_bytes))
      << kCountBits;
  auto& last = resident_clusters_.at(static_cast<size_t>(cluster));
  uint64_t known = last.load(std::memory_order_relaxed);
  if (known >> kCountBits << kCountBits != asked) {
    allow(shared_bytes);
    cudaLaunchAttribute attribute = cluster_of(cluster);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(cluster));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    C10_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, function(), &config));
    known = asked | static_cast<uint64_t>(clusters);
    last.store(known, std::memory_order_relaxed);
  }
  return static_cast<int64_t>(known & ((1U << kCountBits) - 1));
}

}  // namespace cudnn_ops
