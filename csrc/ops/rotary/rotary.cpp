// Rotary position embedding: schemas, checks, the public operator and its derivative, which is a
// rotation back. The CUDA kernel is called in rotary_cuda.cpp; those for CPUs and fake tensors are
// in cudnn_ops/ops/rotary.py.

#include "ops/rotary/rotary.h"
#include "ops/autograd_node.h"
#include "ops/backward_check.h"

#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr const char* kOp = "cudnn_ops.rotary_embedding";
constexpr char kRotaryBackward[] = "RotaryBackward";

const Operator<at::Tensor, Rotary>& rotary_op() {
  static const Operator<at::Tensor, Rotary> op("cudnn_ops::_rotary");
  return op;
}

struct Rotation {
  at::Tensor cos, sin;
  bool is_backward = false;
  CUDNN_OPS_FIELDS(cos, sin, is_backward)
};

// A rotation is linear: its gradient is a rotation back, which can be differentiated again.
variable_list rotary_gradients(const variable_list& grads, const Wanted<1>& /*wanted*/,
                               const Rotation& saved) {
  return {rotary_op().call_with(grads[0], saved.cos, saved.sin, !saved.is_backward)};
}

using RotaryBackwardNode = BackwardNode<kRotaryBackward, rotary_gradients>;

at::Tensor rotary_autograd(c10::DispatchKeySet keys, const Rotary& args) {
  refuse_forward_mode(kOp, args);
  TORCH_CHECK_NOT_IMPLEMENTED(!torch::autograd::compute_requires_grad(args.cos, args.sin), kOp,
                              ": cos and sin have no gradient here");
  const at::Tensor out = call_below_autograd(rotary_op(), keys, args);
  if (torch::autograd::compute_requires_grad(args.input)) {
    set_derivative<RotaryBackwardNode>(torch::autograd::collect_next_edges(args.input), {out},
                                       Rotation{args.cos, args.sin, args.is_backward});
  }
  return out;
}

at::Tensor rotary(const at::Tensor& input, const at::Tensor& cos, const at::Tensor& sin) {
  return rotary_op().call_with(input, cos, sin, /*is_backward=*/false);
}

}  // namespace

void check_rotary(const at::Tensor& input, const at::Tensor& cos, const at::Tensor& sin) {
  TORCH_CHECK_TYPE(cos.defined() && sin.defined(), kOp, ": cos and sin must be tensors, got None");
  TORCH_CHECK_TYPE(is_computed_in(input.scalar_type()), kOp,
                   ": input must be float16, bfloat16 or float32 (float64 too on a CPU); got ",
                   input.scalar_type());
  TORCH_CHECK_TYPE(
      sin.scalar_type() == cos.scalar_type() &&
          (cos.scalar_type() == input.scalar_type() || cos.scalar_type() == at::kFloat),
      kOp, ": cos and sin must be of the input's dtype, ", input.scalar_type(),
      ", or float32; got ", cos.scalar_type(), " and ", sin.scalar_type());
  TORCH_CHECK_VALUE(input.dim() == 4 && input.sym_size(3) % 2 == 0, kOp,
                    ": input must be [B, H, S, D] with an even D; got ", input.sym_sizes());
  TORCH_CHECK_VALUE(cos.dim() == 3 && cos.sym_sizes() == sin.sym_sizes() &&
                        (cos.sym_size(0) == 1 || cos.sym_size(0) == input.sym_size(0)) &&
                        cos.sym_size(1) == input.sym_size(2) &&
                        cos.sym_size(2) == input.sym_size(3) && cos.device() == input.device() &&
                        sin.device() == input.device(),
                    kOp, ": cos and sin must be [B or 1, S, D] for an input ", input.sym_sizes(),
                    " on ", input.device(), "; got ", cos.sym_sizes(), " on ", cos.device(),
                    " and ", sin.sym_sizes(), " on ", sin.device());
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("rotary_embedding(Tensor input, Tensor cos, Tensor sin) -> Tensor", cudnn_ops::rotary,
        tags);
  m.def("_rotary(Tensor input, Tensor cos, Tensor sin, bool is_backward) -> Tensor", tags);
  m.def("_rotary_check(Tensor input, Tensor cos, Tensor sin) -> ()", cudnn_ops::check_rotary, tags);
}

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  m.impl("_rotary", cudnn_ops::kernel<cudnn_ops::rotary_autograd>);
}
