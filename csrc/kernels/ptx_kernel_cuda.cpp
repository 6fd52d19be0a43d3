#include "ptx_kernel.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include <limits>
#include <mutex>

namespace cudnn_ops {

const void* PtxKernel::function() const {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (function_ == nullptr) {
    cudaLibrary_t library = nullptr;
    C10_CUDA_CHECK(cudaLibraryLoadData(&library, ptx_, nullptr, nullptr, 0, nullptr, nullptr, 0));
    cudaKernel_t kernel = nullptr;
    C10_CUDA_CHECK(cudaLibraryGetKernel(&kernel, library, name_));
    function_ = kernel;
  }
  return function_;
}

void PtxKernel::launch(int64_t blocks, int rows, int threads, void** arguments,
                       int shared_bytes) const {
  TORCH_CHECK_VALUE(blocks <= std::numeric_limits<int32_t>::max(), name_, ": too many tokens");
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(rows));
  const void* kernel = function();
  // A block has 48 KiB with what the kernel declares without being asked for.
  constexpr int kUnasked = 32 << 10;
  if (shared_bytes > kUnasked) {
    C10_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  }
  C10_CUDA_CHECK(cudaLaunchKernel(kernel, grid, dim3(static_cast<unsigned>(threads)), arguments,
                                  static_cast<size_t>(shared_bytes),
                                  c10::cuda::getCurrentCUDAStream()));
}

}  // namespace cudnn_ops
