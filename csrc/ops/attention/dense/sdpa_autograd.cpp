// Scaled dot-product attention: its derivative and its autocast rule.

#include "ops/attention/attention_autograd.h"
#include "ops/attention/dense/sdpa_regular.h"

#include <torch/library.h>

namespace cudnn_ops {
namespace {

struct SdpaFamily {
  using Args = Sdpa;
  using Backward = SdpaBackward;
  using Gradients = cudnn_ops::Gradients;

  struct Saved {
    Sdpa args;
    at::Tensor out, lse;
    CUDNN_OPS_FIELDS(args, out, lse)
  };

  static constexpr char kName[] = "sdpa";
  static constexpr char kNode[] = "SdpaBackward";
  static constexpr char kOp[] = "cudnn_ops.sdpa";
  static constexpr size_t kInputs = 5;
  static constexpr auto op = sdpa_op;
  static constexpr auto with_lse_op = sdpa_with_lse_op;
  static constexpr auto backward_op = sdpa_backward_op;
  static constexpr auto regular = sdpa_as_regular;
  static constexpr auto regular_with_lse = sdpa_with_lse_as_regular;

  static auto inputs(const Sdpa& args) {
    return std::tie(args.query, args.key, args.value, args.attn_mask, args.sinks);
  }
  static std::pair<c10::SymInt, c10::SymInt> lengths(const Sdpa& args) {
    return {args.query.sym_size(2), args.key.sym_size(2)};
  }
  static Sdpa restored(const Saved& saved) {
    return saved.args;
  }
  static const at::Tensor& by_heads(const at::Tensor& lse) {
    return lse;
  }
};

constexpr const char* kNoSecondDerivative =
    "cudnn_ops.sdpa: double backward is not available, cuDNN has no second derivative of "
    "attention; compute that part with torch.nn.functional.scaled_dot_product_attention "
    "under torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)";

Gradients sdpa_backward_autograd(c10::DispatchKeySet keys, const SdpaBackward& given) {
  return without_derivative(sdpa_backward_op(), keys, given, "cudnn_ops.sdpa backward",
                            kNoSecondDerivative);
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  using namespace cudnn_ops;
  register_autograd<SdpaFamily>(m);
  m.impl("_sdpa_backward", kernel<sdpa_backward_autograd>);
}

TORCH_LIBRARY_IMPL(cudnn_ops, AutocastCUDA, m) {
  cudnn_ops::register_autocast<cudnn_ops::SdpaFamily, at::kCUDA>(m);
}

TORCH_LIBRARY_IMPL(cudnn_ops, AutocastCPU, m) {
  cudnn_ops::register_autocast<cudnn_ops::SdpaFamily, at::kCPU>(m);
}
