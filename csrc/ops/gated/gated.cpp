// Gated activations: schemas, checks, the public operators, and their derivative. The kernels are
// in
// ../kernels/gated*.cu and .cpp, those for CPUs and fake tensors in cudnn_ops/ops/gated.py.

#include "ops/gated/gated.h"
#include "ops/autograd_node.h"
#include "ops/backward_check.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr char kBackward[] = "GatedBackward";

variable_list gated_gradients(const variable_list& grads, const Wanted<2>& wanted,
                              const at::Tensor& gate, const at::Tensor& up, int64_t activation) {
  return only_wanted(wanted, gated_backward_op().call(grads[0], gate, up, activation));
}

using GatedBackwardNode = FlatNode<kBackward, gated_gradients>;

at::Tensor gated_autograd(c10::DispatchKeySet keys, const at::Tensor& gate, const at::Tensor& up,
                          int64_t activation) {
  refuse_forward_mode("cudnn_ops.swiglu and geglu", {gate, up});
  const at::Tensor out = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return gated_op().redispatch(below_autograd(keys), gate, up, activation);
  }();
  if (torch::autograd::compute_requires_grad(gate, up)) {
    auto node = make_node<GatedBackwardNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(gate, up));
    torch::autograd::set_history(out, node);
    node->save(gate, up, activation);
  }
  return out;
}

GatedGradients gated_backward_autograd(c10::DispatchKeySet keys, const at::Tensor& grad_out,
                                       const at::Tensor& gate, const at::Tensor& up,
                                       int64_t activation) {
  GatedGradients grads;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    grads = gated_backward_op().redispatch(below_autograd(keys), grad_out, gate, up, activation);
  }
  if (torch::autograd::compute_requires_grad(grad_out, gate, up)) {
    auto node = make_node<torch::autograd::Error>(
        "cudnn_ops: double backward of swiglu and geglu is not available; compute that part with "
        "torch.nn.functional",
        torch::autograd::collect_next_edges(grad_out, gate, up));
    torch::autograd::set_history(std::get<0>(grads), node);
    torch::autograd::set_history(std::get<1>(grads), node);
  }
  return grads;
}

const char* name_of(int64_t activation) {
  return activation == static_cast<int64_t>(Activation::kSilu) ? "cudnn_ops.swiglu"
                                                               : "cudnn_ops.geglu";
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return gated_op().call(gate, up, static_cast<int64_t>(Activation::kSilu));
}

at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up, std::string_view approximate) {
  TORCH_CHECK_VALUE(approximate == "none" || approximate == "tanh",
                    "cudnn_ops.geglu: approximate must be \"none\" or \"tanh\", got \"",
                    approximate, "\"");
  const auto activation = approximate == "tanh" ? Activation::kGeluTanh : Activation::kGelu;
  return gated_op().call(gate, up, static_cast<int64_t>(activation));
}

}  // namespace

void check_gated(const at::Tensor& gate, const at::Tensor& up, int64_t activation) {
  const char* op = name_of(activation);
  TORCH_CHECK_VALUE(activation >= 0 && activation <= static_cast<int64_t>(Activation::kGeluTanh),
                    op, ": activation must be 0, 1 or 2, got ", activation);
  TORCH_CHECK_TYPE(gate.defined() && up.defined(), op, ": gate and up must be tensors, got None");
  TORCH_CHECK_TYPE(is_computed_in(gate.scalar_type()) && gate.scalar_type() == up.scalar_type(), op,
                   ": gate and up must be of one dtype, float16, bfloat16 or float32 (float64 too "
                   "on a CPU); got ",
                   gate.scalar_type(), " and ", up.scalar_type());
  TORCH_CHECK_VALUE(gate.sym_sizes() == up.sym_sizes() && gate.device() == up.device(), op,
                    ": gate and up must be of one shape, on one device; got ", gate.sym_sizes(),
                    " on ", gate.device(), " and ", up.sym_sizes(), " on ", up.device());
}

void check_gated_backward(const at::Tensor& grad_out, const at::Tensor& gate, const at::Tensor& up,
                          int64_t activation) {
  check_gated(gate, up, activation);
  check_like(grad_out, gate, name_of(activation), "grad_out");
}

const c10::TypedOperatorHandle<at::Tensor(const at::Tensor&, const at::Tensor&, int64_t)>&
gated_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cudnn_ops::_gated", "")
                             .typed<at::Tensor(const at::Tensor&, const at::Tensor&, int64_t)>();
  return op;
}

const c10::TypedOperatorHandle<GatedGradients(const at::Tensor&, const at::Tensor&,
                                              const at::Tensor&, int64_t)>&
gated_backward_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cudnn_ops::_gated_backward", "")
                             .typed<GatedGradients(const at::Tensor&, const at::Tensor&,
                                                   const at::Tensor&, int64_t)>();
  return op;
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor", cudnn_ops::swiglu, tags);
  m.def("geglu(Tensor gate, Tensor up, *, str approximate=\"none\") -> Tensor", cudnn_ops::geglu,
        tags);
  m.def("_gated(Tensor gate, Tensor up, int activation) -> Tensor", tags);
  m.def(
      "_gated_backward(Tensor grad_out, Tensor gate, Tensor up, int activation) -> "
      "(Tensor grad_gate, Tensor grad_up)",
      tags);
  m.def("_gated_check(Tensor gate, Tensor up, int activation) -> ()", cudnn_ops::check_gated, tags);
  m.def("_gated_backward_check(Tensor grad_out, Tensor gate, Tensor up, int activation) -> ()",
        cudnn_ops::check_gated_backward, tags);
}

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  m.impl("_gated", cudnn_ops::gated_autograd);
  m.impl("_gated_backward", cudnn_ops::gated_backward_autograd);
}
