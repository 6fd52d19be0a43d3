// Gated activations on CUDA.

#include "ops/gated/gated.h"

#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

void check_cuda_dtype(const at::Tensor& gate) {
  TORCH_CHECK_TYPE(gate.scalar_type() != at::kDouble,
                   "cudnn_ops: gated activations are float16, bfloat16 or float32 on a GPU; got ",
                   gate.scalar_type());
}

at::Tensor empty_dense(const at::Tensor& tensor) {
  return at::detail::empty_cuda(tensor.sizes(), tensor.scalar_type(), tensor.device(),
                                std::nullopt);
}

at::Tensor gated_cuda(const Gated& args) {
  check_gated(args);
  check_cuda_dtype(args.gate);
  const c10::cuda::CUDAGuard device_guard(args.gate.device());
  const at::Tensor out = empty_dense(args.gate);
  gated_forward(args.gate, args.up, static_cast<GatedActivation>(args.activation), out);
  return out;
}

void gated_in_place_cuda(const Gated& args) {
  check_gated(args);
  check_cuda_dtype(args.gate);
  TORCH_CHECK_VALUE(args.gate.is_contiguous(),
                    "cudnn_ops._gated_: gate must be contiguous, got strides ",
                    args.gate.strides());
  const c10::cuda::CUDAGuard device_guard(args.gate.device());
  gated_forward(args.gate, args.up, static_cast<GatedActivation>(args.activation), args.gate);
}

GatedGradients gated_backward_cuda(const GatedBackward& args) {
  const auto& [gate, up, activation] = args.forward;
  check_gated_backward(args);
  check_cuda_dtype(gate);
  const c10::cuda::CUDAGuard device_guard(gate.device());
  const at::Tensor grad_gate = empty_dense(gate), grad_up = empty_dense(gate);
  gated_backward(args.grad_out, gate, up, static_cast<GatedActivation>(activation), grad_gate,
                 grad_up);
  return {grad_gate, grad_up};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_gated", cudnn_ops::kernel<cudnn_ops::gated_cuda>);
  m.impl("_gated_", cudnn_ops::kernel<cudnn_ops::gated_in_place_cuda>);
  m.impl("_gated_backward", cudnn_ops::kernel<cudnn_ops::gated_backward_cuda>);
}
