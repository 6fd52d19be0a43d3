// Attention over packed sequences: its derivative and its autocast rule.

#include "ops/attention/attention_autograd.h"
#include "ops/attention/packed/varlen.h"

#include <torch/library.h>

namespace cudnn_ops {
namespace {

struct VarlenFamily {
  using Args = Varlen;
  using Backward = VarlenBackward;
  using Gradients = VarlenGradients;

  struct Saved {
    Varlen args;
    at::Tensor out, lse;
    // None where one tensor serves both sides. Whether it does decides on the plan, and hooks would
    // bring two tensors back.
    OptionalTensor cu_seqlens_k = args.cu_seqlens_k.is_same(args.cu_seqlens_q)
                                      ? std::nullopt
                                      : OptionalTensor(args.cu_seqlens_k);

    // Those of Varlen but cu_seqlens_k, which is number 4.
    template <class Self>
    static auto fields(Self& self) {
      const auto args = Varlen::fields(self.args);
      return std::tuple_cat(first_fields<4>(args), std::tie(self.cu_seqlens_k),
                            other_fields<5>(args), std::tie(self.out, self.lse));
    }
  };

  static constexpr char kName[] = "varlen_attention";
  static constexpr char kNode[] = "VarlenBackward";
  static constexpr char kOp[] = "cudnn_ops.varlen_attention";
  static constexpr size_t kInputs = 4;
  static constexpr auto op = varlen_op;
  static constexpr auto with_lse_op = varlen_with_lse_op;
  static constexpr auto backward_op = varlen_backward_op;
  static constexpr auto regular = varlen_as_regular;
  static constexpr auto regular_with_lse = varlen_with_lse_as_regular;

  static auto inputs(const Varlen& args) {
    return std::tie(args.query, args.key, args.value, args.sinks);
  }
  static std::pair<c10::SymInt, c10::SymInt> lengths(const Varlen& args) {
    return {args.max_seqlen_q, args.max_seqlen_k};
  }
  static Varlen restored(const Saved& saved) {
    Varlen args = saved.args;
    args.cu_seqlens_k = saved.cu_seqlens_k.value_or(args.cu_seqlens_q);
    return args;
  }
  static at::Tensor by_heads(const at::Tensor& lse) {
    return lse.t();
  }
};

VarlenGradients varlen_backward_autograd(c10::DispatchKeySet keys, const VarlenBackward& given) {
  return without_derivative(varlen_backward_op(), keys, given,
                            "cudnn_ops.varlen_attention backward",
                            "cudnn_ops.varlen_attention: double backward is not available, cuDNN "
                            "has no second derivative of attention");
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  using namespace cudnn_ops;
  register_autograd<VarlenFamily>(m);
  m.impl("_varlen_backward", kernel<varlen_backward_autograd>);
}

TORCH_LIBRARY_IMPL(cudnn_ops, AutocastCUDA, m) {
  cudnn_ops::register_autocast<cudnn_ops::VarlenFamily, at::kCUDA>(m);
}

TORCH_LIBRARY_IMPL(cudnn_ops, AutocastCPU, m) {
  cudnn_ops::register_autocast<cudnn_ops::VarlenFamily, at::kCPU>(m);
}
