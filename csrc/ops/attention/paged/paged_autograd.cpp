// Attention over pages has no derivative: cuDNN has none. Written out, for torch's own fallback of
// that kind passes every argument through a stack, 3 us a call.

#include "ops/attention/paged/paged.h"
#include "ops/autograd_node.h"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr const char* kOp = "cudnn_ops.paged_attention";

at::Tensor paged_autograd(c10::DispatchKeySet keys, const Paged& args) {
  return without_derivative(paged_op(), keys, args, kOp,
                            "derivative for cudnn_ops::paged_attention is not implemented");
}

OutAndLse paged_with_lse_autograd(c10::DispatchKeySet keys, const Paged& args) {
  return without_derivative(
      paged_with_lse_op(), keys, args, kOp,
      "derivative for cudnn_ops::paged_attention_with_lse is not implemented");
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  using namespace cudnn_ops;
  m.impl("paged_attention", kernel<paged_autograd>);
  m.impl("paged_attention_with_lse", kernel<paged_with_lse_autograd>);
  // What is written in place has no derivative either.
  for (const char* name : {"_paged_attention_out", "paged_kv_append_"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}
