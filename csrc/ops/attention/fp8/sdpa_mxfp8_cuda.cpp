// MXFP8 attention on CUDA: allocate, make the key, run the plan.

#include "ops/attention/fp8/sdpa_mxfp8.h"
#include "ops/attention/layout.h"
#include "ops/attention/plan_tensors_cuda.h"

#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <array>
#include <string>

namespace cudnn_ops {
namespace {

using graph::TensorDesc;

constexpr CallName kCall{
    "cudnn_ops.sdpa_mxfp8",
    "`python -m cudnn_ops explain sdpa_mxfp8` shows what cuDNN supports on a GPU; "
    "cudnn_ops.sdpa_fp8 and cudnn_ops.scaled_dot_product_attention have kernels for the rest"};

SdpaMxFp8Results sdpa_mxfp8_cuda(const SdpaMxFp8& given) {
  check_sdpa_mxfp8(given);
  const Sdpa& args = given.args;
  const auto& query = args.query;
  const c10::cuda::CUDAGuard device_guard(query.device());
  graph::require_sm80(kCall.op, query.get_device());
  const std::array<int64_t, 4> sizes{query.size(0), query.size(1), query.size(2),
                                     args.value.size(3)};
  const auto numbers = [&](c10::IntArrayRef shape) -> at::Tensor {
    return at::detail::empty_cuda(shape, at::kFloat, query.device(), std::nullopt);
  };
  SdpaForwardTensors tensors{};
  tensors.out = at::detail::empty_strided_cuda(sizes, dense_strides_like(sizes, query),
                                               given.out_dtype, query.device());
  tensors.lse = numbers(query.sizes().slice(0, 3));
  const at::Tensor amax = numbers({1});
  amax.zero_();
  if (tensors.out.numel() == 0 || args.key.size(2) == 0) {
    fill_with_nothing(tensors.out, tensors.lse, std::nullopt);
    return {tensors.out, tensors.lse, amax};
  }
  const std::string why = why_no_mxfp8(args);
  TORCH_CHECK_NOT_IMPLEMENTED(why.empty(), why);
  tensors.query = addressable(query, query);
  tensors.key = addressable(args.key, args.key);
  tensors.value = addressable(args.value, args.value);
  tensors.scale = Scale(args.scale, query).value;
  const auto params =
      sdpa_mxfp8_params(args, TensorDesc::of(tensors.query), TensorDesc::of(tensors.key),
                        TensorDesc::of(tensors.value), TensorDesc::of(tensors.out));
  SdpaPointers pointers(params, tensors);
  const std::array<at::Tensor, 3> scales{graph::dense(given.descale_query),
                                         graph::dense(given.descale_key),
                                         graph::dense(given.descale_value)};
  for (const at::Tensor& scale : scales) {
    pointers.all.push_back(const_cast<void*>(scale.const_data_ptr()));
  }
  pointers.written.push_back({pointers.all.size(), amax.nbytes()});
  pointers.all.push_back(amax.mutable_data_ptr());
  const graph::Call call = call_of(kCall, pointers);
  graph::execute(call, *graph::get_plan(call, graph::PlanKey::of(params, query.get_device())));
  return {tensors.out, tensors.lse, amax};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_sdpa_mxfp8", cudnn_ops::kernel<cudnn_ops::sdpa_mxfp8_cuda>);
}
