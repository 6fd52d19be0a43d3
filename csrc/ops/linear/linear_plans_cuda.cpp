#include "ops/linear/linear_plans.h"
#include "ops/linear/linear_choice.h"
#include "ops/linear/linear_problem.h"

#include "graph/call_pointers.h"
#include "kernels/device_kernel.h"

#include <ATen/cuda/EmptyTensor.h>

namespace cudnn_ops {
namespace {

bool is_for_graph(LinearStep step, Activation activation, const at::Tensor& left, int64_t columns) {
  return is_graph_faster(current_limits().sm_version,
                         {step, activation, left.size(0), columns, left.size(1)});
}

template <class Params>
bool run(const char* op, const Params& params, const graph::CallPointers& pointers, int device) {
  const graph::Call call{op, "torch.nn.functional.linear runs it", pointers.all, pointers.written};
  const auto plan = graph::often_called_plan(call, graph::PlanKey::of(params, device));
  if (plan != nullptr) graph::execute(call, *plan);
  return plan != nullptr;
}

}  // namespace

bool run_layer_by_plan(const char* op, const LinearStepCall& call) {
  const bool with_before = call.before.defined();
  const auto step = with_before ? LinearStep::kTraining : LinearStep::kInference;
  if (!is_for_graph(step, call.activation, call.input, call.out.size(1))) return false;
  const Linear args{call.input, call.weight, call.bias, call.residual,
                    static_cast<int64_t>(call.activation)};
  if (!reason_for_no_plan(args).empty()) return false;
  at::Tensor bias, residual;
  if (call.bias) bias = graph::dense(*call.bias);
  if (call.residual) residual = graph::dense(*call.residual);
  graph::CallPointers pointers;
  for (const auto& tensor : {call.input, call.weight, bias, residual}) pointers.read(tensor);
  pointers.write(call.before);
  pointers.write(call.out);
  return run(op, linear_params(args, with_before), pointers, call.input.get_device());
}

at::Tensor into_hidden_by_plan(const char* op, const at::Tensor& grad_out, const at::Tensor& weight,
                               const OptionalTensor& saved, Activation activation,
                               const at::Tensor& grad_bias) {
  const int64_t columns = weight.size(1);
  if (!saved || !is_for_graph(LinearStep::kHiddenGradient, activation, grad_out, columns)) {
    return {};
  }
  const HiddenGradient args{grad_out, weight, activation, grad_bias.defined()};
  if (!reason_for_no_plan(args).empty()) return {};
  const auto empty = [&](c10::IntArrayRef sizes, at::ScalarType dtype) {
    return at::detail::empty_cuda(sizes, dtype, grad_out.device(), std::nullopt);
  };
  const at::Tensor grad = empty({grad_out.size(0), columns}, grad_out.scalar_type());
  at::Tensor sum;
  // An engine may add to what is there.
  if (args.with_sum) sum = empty({columns}, at::kFloat).zero_();
  const at::Tensor of_activation = graph::dense(*saved);
  graph::CallPointers pointers;
  for (const auto& tensor : {grad_out, weight, of_activation}) pointers.read(tensor);
  pointers.write(grad);
  pointers.write(sum);
  if (!run(op, hidden_gradient_params(args), pointers, grad_out.get_device())) return {};
  if (sum.defined()) at::Tensor(grad_bias).copy_(sum);
  return grad;
}

}  // namespace cudnn_ops
