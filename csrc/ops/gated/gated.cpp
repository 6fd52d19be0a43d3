// Gated activations: schemas, checks, the public operators and their derivative. The CUDA kernels
// are called in gated_cuda.cpp; those for CPUs and fake tensors are in cudnn_ops/ops/gated.py.

#include "ops/gated/gated.h"
#include "ops/autograd_node.h"
#include "ops/backward_check.h"

#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr char kGatedBackward[] = "GatedBackward";

const char* name_of(const Gated& args) {
  return args.activation == static_cast<int64_t>(GatedActivation::kSilu) ? "cudnn_ops.swiglu"
                                                                         : "cudnn_ops.geglu";
}

const Operator<at::Tensor, Gated>& gated_op() {
  static const Operator<at::Tensor, Gated> op("cudnn_ops::_gated");
  return op;
}

const Operator<GatedGradients, GatedBackward>& gated_backward_op() {
  static const Operator<GatedGradients, GatedBackward> op("cudnn_ops::_gated_backward");
  return op;
}

variable_list gated_gradients(const variable_list& grads, const Wanted<2>& wanted,
                              const Gated& saved) {
  return only_wanted(
      wanted, gated_backward_op().call_with(grads[0], saved.gate, saved.up, saved.activation));
}

using GatedBackwardNode = BackwardNode<kGatedBackward, gated_gradients>;

at::Tensor gated_autograd(c10::DispatchKeySet keys, const Gated& args) {
  refuse_forward_mode(name_of(args), args);
  const at::Tensor out = call_below_autograd(gated_op(), keys, args);
  if (torch::autograd::compute_requires_grad(args.gate, args.up)) {
    set_derivative<GatedBackwardNode>(torch::autograd::collect_next_edges(args.gate, args.up),
                                      {out}, args);
  }
  return out;
}

GatedGradients gated_backward_autograd(c10::DispatchKeySet keys, const GatedBackward& args) {
  return without_derivative(
      gated_backward_op(), keys, args, name_of(args.forward),
      "cudnn_ops: double backward of swiglu and geglu is not available; compute that part with "
      "torch.nn.functional");
}

at::Tensor gated(const at::Tensor& gate, const at::Tensor& up, GatedActivation activation) {
  return gated_op().call_with(gate, up, static_cast<int64_t>(activation));
}

}  // namespace

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return gated(gate, up, GatedActivation::kSilu);
}

at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up, std::string_view approximate) {
  TORCH_CHECK_VALUE(approximate == "none" || approximate == "tanh",
                    "cudnn_ops.geglu: approximate must be \"none\" or \"tanh\", got \"",
                    approximate, "\"");
  return gated(gate, up,
               approximate == "tanh" ? GatedActivation::kGeluTanh : GatedActivation::kGelu);
}

void check_gated(const Gated& args) {
  const char* op = name_of(args);
  const auto &gate = args.gate, &up = args.up;
  TORCH_CHECK_VALUE(
      args.activation >= 0 && args.activation <= static_cast<int64_t>(GatedActivation::kGeluTanh),
      op, ": activation must be 0, 1 or 2, got ", args.activation);
  TORCH_CHECK_TYPE(gate.defined() && up.defined(), op, ": gate and up must be tensors, got None");
  TORCH_CHECK_TYPE(is_computed_in(gate.scalar_type()) && gate.scalar_type() == up.scalar_type(), op,
                   ": gate and up must be of one dtype, float16, bfloat16 or float32 (float64 too "
                   "on a CPU); got ",
                   gate.scalar_type(), " and ", up.scalar_type());
  TORCH_CHECK_VALUE(gate.sym_sizes() == up.sym_sizes() && gate.device() == up.device(), op,
                    ": gate and up must be of one shape, on one device; got ", gate.sym_sizes(),
                    " on ", gate.device(), " and ", up.sym_sizes(), " on ", up.device());
}

void check_gated_backward(const GatedBackward& args) {
  check_gated(args.forward);
  check_like(args.grad_out, args.forward.gate, name_of(args.forward), "grad_out");
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  using namespace cudnn_ops;
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor", swiglu, tags);
  m.def("geglu(Tensor gate, Tensor up, *, str approximate=\"none\") -> Tensor", geglu, tags);
  m.def("_gated(Tensor gate, Tensor up, int activation) -> Tensor", tags);
  // The result in the place of the gate, for compiled graphs that read this nowhere else.
  m.def("_gated_(Tensor(a!) gate, Tensor up, int activation) -> ()", tags);
  m.def(
      "_gated_backward(Tensor grad_out, Tensor gate, Tensor up, int activation) -> "
      "(Tensor grad_gate, Tensor grad_up)",
      tags);
  m.def("_gated_check(Tensor gate, Tensor up, int activation) -> ()", kernel<check_gated>, tags);
  m.def("_gated_backward_check(Tensor grad_out, Tensor gate, Tensor up, int activation) -> ()",
        kernel<check_gated_backward>, tags);
}

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  m.impl("_gated", cudnn_ops::kernel<cudnn_ops::gated_autograd>);
  m.impl("_gated_backward", cudnn_ops::kernel<cudnn_ops::gated_backward_autograd>);
}
