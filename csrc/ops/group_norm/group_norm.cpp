// Group norm: schemas, checks, and the public operators. These call one operator, which has the
// kernels (group_norm_cuda.cpp; for CPUs and fake tensors cudnn_ops/ops/group_norm.py) and the
// derivative (group_norm_autograd.cpp).

#include "ops/group_norm/group_norm.h"
#include "ops/autocast.h"
#include "ops/backward_check.h"

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

void check_parameter(const GroupNorm& args, const OptionalTensor& parameter, const char* name) {
  if (!parameter) return;
  const auto channels = args.input.sym_size(1);
  TORCH_CHECK_VALUE(parameter->dim() == 1 && parameter->sym_size(0) == channels &&
                        parameter->device() == args.input.device(),
                    name_of(args), ": ", name, " must be [", channels, "], a number for each of ",
                    "input's channels, on ", args.input.device(), "; got ", parameter->sym_sizes(),
                    " on ", parameter->device());
  const auto dtype = parameter->scalar_type();
  TORCH_CHECK_TYPE(dtype == args.input.scalar_type() || dtype == at::kFloat, name_of(args), ": ",
                   name, " must be of the input's dtype, ", args.input.scalar_type(),
                   ", or float32; got ", dtype);
}

// As torch: one number is its own mean, and its norm is 0 whatever it is.
void check_count(const GroupNorm& args) {
  const auto sizes = args.input.sym_sizes();
  c10::SymInt count = sizes[0] * (sizes[1] / args.num_groups);
  for (const auto& size : sizes.slice(2)) count *= size;
  TORCH_CHECK_VALUE(count != 1, name_of(args),
                    ": Expected more than 1 value per channel when training; input ", sizes,
                    " has one in each of its ", args.num_groups, " groups");
}

// What the forward kept of each group.
void check_stats(const GroupNorm& args, const at::Tensor& stats, const char* name) {
  const auto dtype = args.input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  TORCH_CHECK_VALUE(stats.dim() == 2 && stats.sym_size(0) == args.input.sym_size(0) &&
                        stats.sym_size(1) == args.num_groups && stats.is_contiguous() &&
                        stats.scalar_type() == dtype && stats.device() == args.input.device(),
                    name_of(args), " backward: ", name, " must be what the forward gave, ", dtype,
                    " [", args.input.sym_size(0), ", ", args.num_groups, "] on ",
                    args.input.device(), "; got ", stats.scalar_type(), " ", stats.sym_sizes(),
                    " on ", stats.device());
}

int64_t activation_of(std::string_view name, const char* op) {
  TORCH_CHECK_VALUE(name == "none" || name == "silu", op,
                    ": activation must be \"none\" or \"silu\", got \"", name, "\"");
  return static_cast<int64_t>(name == "none" ? Activation::kNone : Activation::kSilu);
}

GroupNormResults group_norm_of(const GroupNorm& args) {
  const bool with_stats =
      torch::autograd::compute_requires_grad(args.input, args.residual, args.weight, args.bias);
  return group_norm_op().call_with(args, with_stats);
}

}  // namespace

// Under autocast on CUDA it computes in float32, by the rule that torch has for its own; on a CPU
// that has none.
at::Tensor group_norm(const at::Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                      const OptionalTensor& bias, double eps, std::string_view activation) {
  const Borrowed<GroupNorm> args(input, /*residual=*/{}, num_groups, weight, bias, eps,
                                 activation_of(activation, "cudnn_ops.group_norm"));
  if (!input.is_cuda() || !at::autocast::is_autocast_enabled(at::kCUDA)) {
    return std::get<0>(group_norm_of(*args));
  }
  GroupNorm casted = *args;
  cast(casted, at::kFloat, at::kCUDA);
  return std::get<0>(group_norm_of(casted));
}

namespace {

// Autocast mixes dtypes, and torch's `input + residual` promotes: so does the sum under it, and the
// parameters follow.
bool is_mixed_by_autocast(const GroupNorm& args) {
  if (!args.input.defined()) return false;
  const auto device = args.input.device().type();
  const auto dtype = args.input.scalar_type(), other = args.residual->scalar_type();
  return (device == at::kCUDA || device == at::kCPU) && at::autocast::is_autocast_enabled(device) &&
         dtype != other && is_computed_in(dtype) && is_computed_in(other);
}

GroupNormResults group_norm_of_promoted(GroupNorm args) {
  const auto dtype = c10::promoteTypes(args.input.scalar_type(), args.residual->scalar_type());
  cast(args, dtype, args.input.device().type());
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return group_norm_of(args);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> add_group_norm(const at::Tensor& input,
                                                  const at::Tensor& residual, int64_t num_groups,
                                                  const OptionalTensor& weight,
                                                  const OptionalTensor& bias, double eps,
                                                  std::string_view activation) {
  const char* op = "cudnn_ops.add_group_norm";
  // Python's None arrives as an undefined tensor.
  TORCH_CHECK_TYPE(residual.defined(), op, ": residual must be a tensor, got None");
  const Borrowed<GroupNorm> args(input, residual, num_groups, weight, bias, eps,
                                 activation_of(activation, op));
  auto [out, sum, mean, rstd] =
      is_mixed_by_autocast(*args) ? group_norm_of_promoted(*args) : group_norm_of(*args);
  return {std::move(out), std::move(sum)};
}

const char* name_of(const GroupNorm& args) {
  return args.residual ? "cudnn_ops.add_group_norm" : "cudnn_ops.group_norm";
}

void check_group_norm(const GroupNorm& args) {
  const auto& input = args.input;
  const char* op = name_of(args);
  TORCH_CHECK_TYPE(input.defined(), op, ": input must be a tensor, got None");
  TORCH_CHECK_VALUE(input.dim() >= 2, op, ": input must be [N, C, ...], with two dimensions or ",
                    "more; got ", input.sym_sizes());
  TORCH_CHECK_VALUE(args.num_groups >= 1, op, ": num_groups must be 1 or more, got ",
                    args.num_groups);
  TORCH_CHECK_VALUE(input.sym_size(1) % args.num_groups == 0, op,
                    ": num_groups must divide input's channels, ", input.sym_size(1), "; got ",
                    args.num_groups);
  TORCH_CHECK_VALUE(args.activation == static_cast<int64_t>(Activation::kNone) || args.has_silu(),
                    op, ": activation must be ", static_cast<int64_t>(Activation::kNone), " or ",
                    static_cast<int64_t>(Activation::kSilu), ", got ", args.activation);
  TORCH_CHECK_TYPE(is_computed_in(input.scalar_type()), op,
                   ": input must be float16, bfloat16 or float32 (float64 too on a CPU); got ",
                   input.scalar_type());
  check_count(args);
  TORCH_CHECK_VALUE(!args.residual || (args.residual->sym_sizes() == input.sym_sizes() &&
                                       args.residual->device() == input.device()),
                    op, ": residual must be of input's shape, ", input.sym_sizes(), ", on ",
                    input.device(), "; got ", args.residual->sym_sizes(), " on ",
                    args.residual->device());
  TORCH_CHECK_TYPE(!args.residual || args.residual->scalar_type() == input.scalar_type(), op,
                   ": residual must be of input's dtype, ", input.scalar_type(), "; got ",
                   args.residual->scalar_type());
  check_parameter(args, args.weight, "weight");
  check_parameter(args, args.bias, "bias");
}

void check_group_norm_backward(const GroupNormBackward& args) {
  const GroupNorm norm = args.saved.norm();
  check_group_norm(norm);
  check_like(args.grad_out, norm.input, name_of(norm), "grad_out");
  if (args.grad_sum) check_like(*args.grad_sum, norm.input, name_of(norm), "grad_sum");
  check_stats(norm, args.saved.mean, "mean");
  check_stats(norm, args.saved.rstd, "rstd");
  TORCH_CHECK_VALUE((norm.weight || !args.output_mask[1]) && (norm.bias || !args.output_mask[2]),
                    name_of(norm), " backward: output_mask asks for the gradient of a weight or ",
                    "bias, and there is none");
}

const Operator<GroupNormResults, GroupNormForward>& group_norm_op() {
  static const Operator<GroupNormResults, GroupNormForward> op("cudnn_ops::_group_norm");
  return op;
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  using namespace cudnn_ops;
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "group_norm(Tensor input, int num_groups, Tensor? weight=None, Tensor? bias=None, "
      "float eps=1e-05, *, str activation=\"none\") -> Tensor",
      group_norm, tags);
  m.def(
      "add_group_norm(Tensor input, Tensor residual, int num_groups, Tensor? weight=None, "
      "Tensor? bias=None, float eps=1e-05, *, str activation=\"none\") -> "
      "(Tensor out, Tensor sum)",
      add_group_norm, tags);
  const std::string arguments =
      "(Tensor input, Tensor? residual, int num_groups, Tensor? weight, Tensor? bias, float eps, "
      "int activation";
  const std::string backward =
      "(Tensor grad_out, Tensor? grad_sum, Tensor input, int num_groups, Tensor? weight, "
      "Tensor? bias, Tensor mean, Tensor rstd, int activation, bool[3] output_mask";
  m.def(("_group_norm" + arguments +
         ", bool with_stats) -> (Tensor out, Tensor sum, Tensor mean, Tensor rstd)")
            .c_str(),
        tags);
  m.def(("_group_norm_backward" + backward +
         ") -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)")
            .c_str(),
        tags);
  m.def(("_group_norm_check" + arguments + ") -> ()").c_str(), kernel<check_group_norm>, tags);
  m.def(("_group_norm_backward_check" + backward + ") -> ()").c_str(),
        kernel<check_group_norm_backward>, tags);
}
