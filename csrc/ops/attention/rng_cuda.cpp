// The random numbers of dropout: torch's CUDA generator says where cuDNN's Philox starts.

#include "ops/attention/attention.h"

#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <mutex>

namespace cudnn_ops {
namespace {

// On the device, so that a CUDA graph that holds this call draws new numbers at each replay: while
// one is captured, torch keeps seed and offset in device memory, and moves the offset on.
at::Tensor rng_state(const RngState& args) {
  const at::Tensor& query = args.query;
  const c10::cuda::CUDAGuard device_guard(query.device());
  auto* generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(
      std::nullopt, at::cuda::detail::getDefaultCUDAGenerator(query.get_device()));
  // What one thread may draw, as TransformerEngine counts it for these kernels: the scores of a
  // head among the 128 threads of a block.
  const auto scores = static_cast<uint64_t>(args.length.expect_int()) *
                      static_cast<uint64_t>(args.length_kv.expect_int());
  const uint64_t count = (scores + 127) / 128;
  at::PhiloxCudaState state;
  {
    const std::lock_guard<std::mutex> lock(generator->mutex_);
    state = generator->philox_cuda_state(count);
  }
  const auto on_device = at::TensorOptions().dtype(at::kLong).device(query.device());
  const at::Tensor result = at::detail::empty_cuda({2}, on_device);
  at::Tensor seed = result.select(0, 0), offset = result.select(0, 1);
  if (state.captured_) {
    const auto intragraph = static_cast<int64_t>(state.offset_intragraph_);
    seed.copy_(at::from_blob(state.seed_.ptr, {}, on_device));
    offset.copy_(at::from_blob(state.offset_.ptr, {}, on_device).add(intragraph));
  } else {  // filled, for a copy of the host's memory may wait for the GPU
    seed.fill_(static_cast<int64_t>(state.seed_.val));
    offset.fill_(static_cast<int64_t>(state.offset_.val));
  }
  return result;
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_attention_rng_state", cudnn_ops::kernel<cudnn_ops::rng_state>);
}
