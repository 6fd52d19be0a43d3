// Layer norm and RMS norm: schemas, checks, and the public operators. These call one operator,
// which has the kernels (norm_cuda.cpp; for CPUs and fake tensors cudnn_ops/ops/norm.py) and the
// derivative (norm_autograd.cpp).

#include "ops/norm/norm.h"
#include "ops/autocast.h"
#include "ops/backward_check.h"

#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <limits>

namespace cudnn_ops {
namespace {

void check_parameter(const Norm& args, const OptionalTensor& parameter, const char* name) {
  if (!parameter) return;
  const c10::SymIntArrayRef shape = args.normalized_shape;
  TORCH_CHECK_VALUE(parameter->sym_sizes() == shape && parameter->device() == args.input.device(),
                    name_of(args), ": ", name, " must be of normalized_shape, ", shape, ", on ",
                    args.input.device(), "; got ", parameter->sym_sizes(), " on ",
                    parameter->device());
  const auto dtype = parameter->scalar_type();
  TORCH_CHECK_TYPE(dtype == args.input.scalar_type() || dtype == at::kFloat, name_of(args), ": ",
                   name, " must be of the input's dtype, ", args.input.scalar_type(),
                   ", or float32; got ", dtype);
}

// What the forward kept of each row.
void check_stats(const Norm& args, const at::Tensor& stats, const c10::SymInt& rows,
                 const char* name) {
  const auto dtype = args.input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  TORCH_CHECK_VALUE(stats.dim() == 1 && stats.sym_size(0) == rows && stats.is_contiguous() &&
                        stats.scalar_type() == dtype && stats.device() == args.input.device(),
                    name_of(args), " backward: ", name, " must be what the forward gave, ", dtype,
                    " [", rows, "] on ", args.input.device(), "; got ", stats.scalar_type(), " ",
                    stats.sym_sizes(), " on ", stats.device());
}

// As torch: without an eps, the machine epsilon of the dtype that it computes in.
double default_eps(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                            : std::numeric_limits<float>::epsilon();
}

NormResults norm(const Norm& args) {
  const bool with_stats =
      torch::autograd::compute_requires_grad(args.input, args.residual, args.weight, args.bias);
  return norm_op().call_with(args, with_stats);
}

// Autocast mixes dtypes, and torch's `input + residual` promotes: so does the sum under it, and the
// parameters follow.
bool is_mixed_by_autocast(const Norm& args) {
  if (!args.input.defined()) return false;
  const auto device = args.input.device().type();
  const auto dtype = args.input.scalar_type(), other = args.residual->scalar_type();
  return (device == at::kCUDA || device == at::kCPU) && at::autocast::is_autocast_enabled(device) &&
         dtype != other && is_computed_in(dtype) && is_computed_in(other);
}

NormResults norm_of_promoted(Norm args) {
  const auto dtype = c10::promoteTypes(args.input.scalar_type(), args.residual->scalar_type());
  cast(args, dtype, args.input.device().type());
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return norm(args);
}

std::tuple<at::Tensor, at::Tensor> out_and_sum(const Norm& args) {
  // Python's None arrives as an undefined tensor.
  TORCH_CHECK_TYPE(args.residual->defined(), name_of(args),
                   ": residual must be a tensor, got None");
  auto [out, sum, mean, rstd] = is_mixed_by_autocast(args) ? norm_of_promoted(args) : norm(args);
  return {std::move(out), std::move(sum)};
}

}  // namespace

at::Tensor rms_norm(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                    const OptionalTensor& weight, std::optional<double> eps, bool zero_centered) {
  const Borrowed<Norm> args(input, /*residual=*/{}, normalized_shape, weight, /*bias=*/{},
                            eps.value_or(default_eps(input)), /*is_layer=*/false, zero_centered);
  return std::get<0>(norm(*args));
}

// Under autocast on CUDA it computes in float32, by the rule that torch has for its own; RMS norm
// has none there, and on a CPU neither has.
at::Tensor layer_norm(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                      const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                      bool zero_centered) {
  const Borrowed<Norm> args(input, /*residual=*/{}, normalized_shape, weight, bias, eps,
                            /*is_layer=*/true, zero_centered);
  if (!input.is_cuda() || !at::autocast::is_autocast_enabled(at::kCUDA)) {
    return std::get<0>(norm(*args));
  }
  Norm casted = *args;
  cast(casted, at::kFloat, at::kCUDA);
  return std::get<0>(norm(casted));
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& input, const at::Tensor& residual,
                                                c10::SymIntArrayRef normalized_shape,
                                                const OptionalTensor& weight,
                                                std::optional<double> eps, bool zero_centered) {
  const Borrowed<Norm> args(input, residual, normalized_shape, weight, /*bias=*/{},
                            eps.value_or(default_eps(input)), /*is_layer=*/false, zero_centered);
  return out_and_sum(*args);
}

std::tuple<at::Tensor, at::Tensor> add_layer_norm(
    const at::Tensor& input, const at::Tensor& residual, c10::SymIntArrayRef normalized_shape,
    const OptionalTensor& weight, const OptionalTensor& bias, double eps, bool zero_centered) {
  const Borrowed<Norm> args(input, residual, normalized_shape, weight, bias, eps,
                            /*is_layer=*/true, zero_centered);
  return out_and_sum(*args);
}

const char* name_of(const Norm& args) {
  if (args.residual) return args.is_layer ? "cudnn_ops.add_layer_norm" : "cudnn_ops.add_rms_norm";
  return args.is_layer ? "cudnn_ops.layer_norm" : "cudnn_ops.rms_norm";
}

void check_norm(const Norm& args) {
  const auto& input = args.input;
  TORCH_CHECK_TYPE(input.defined(), name_of(args), ": input must be a tensor, got None");
  const c10::SymIntArrayRef shape = args.normalized_shape;
  const auto dims = static_cast<int64_t>(shape.size());
  TORCH_CHECK_VALUE(dims >= 1, name_of(args),
                    ": normalized_shape must have at least one number, the last dimension's size");
  TORCH_CHECK_VALUE(input.dim() >= dims && input.sym_sizes().slice(input.dim() - dims) == shape,
                    name_of(args), ": input must end with normalized_shape, ", shape, "; got ",
                    input.sym_sizes());
  TORCH_CHECK_TYPE(is_computed_in(input.scalar_type()), name_of(args),
                   ": input must be float16, bfloat16 or float32 (float64 too on a CPU); got ",
                   input.scalar_type());
  TORCH_CHECK_VALUE(!args.residual || (args.residual->sym_sizes() == input.sym_sizes() &&
                                       args.residual->device() == input.device()),
                    name_of(args), ": residual must be of input's shape, ", input.sym_sizes(),
                    ", on ", input.device(), "; got ", args.residual->sym_sizes(), " on ",
                    args.residual->device());
  TORCH_CHECK_TYPE(!args.residual || args.residual->scalar_type() == input.scalar_type(),
                   name_of(args), ": residual must be of input's dtype, ", input.scalar_type(),
                   "; got ", args.residual->scalar_type());
  check_parameter(args, args.weight, "weight");
  check_parameter(args, args.bias, "bias");
}

void check_norm_backward(const NormBackward& args) {
  const Norm norm = args.saved.norm();
  check_norm(norm);
  const auto& input = norm.input;
  check_like(args.grad_out, input, name_of(norm), "grad_out");
  if (args.grad_sum) check_like(*args.grad_sum, input, name_of(norm), "grad_sum");
  c10::SymInt rows = 1;
  const auto leading = input.dim() - static_cast<int64_t>(norm.normalized_shape.size());
  for (const auto& size : input.sym_sizes().slice(0, leading)) rows *= size;
  check_stats(norm, args.saved.rstd, rows, "rstd");
  if (norm.is_layer) check_stats(norm, args.saved.mean, rows, "mean");
  TORCH_CHECK_VALUE(norm.is_layer || !args.output_mask[2], name_of(norm),
                    " backward: output_mask asks for the gradient of a bias, and there is none");
}

const Operator<NormResults, NormForward>& norm_op() {
  static const Operator<NormResults, NormForward> op("cudnn_ops::_norm");
  return op;
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  using namespace cudnn_ops;
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, *, "
      "bool zero_centered=False) -> Tensor",
      rms_norm, tags);
  m.def(
      "layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, "
      "float eps=1e-05, *, bool zero_centered=False) -> Tensor",
      layer_norm, tags);
  m.def(
      "add_rms_norm(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight=None, "
      "float? eps=None, *, bool zero_centered=False) -> (Tensor out, Tensor sum)",
      add_rms_norm, tags);
  m.def(
      "add_layer_norm(Tensor input, Tensor residual, SymInt[] normalized_shape, "
      "Tensor? weight=None, Tensor? bias=None, float eps=1e-05, *, bool zero_centered=False) -> "
      "(Tensor out, Tensor sum)",
      add_layer_norm, tags);
  const std::string arguments =
      "(Tensor input, Tensor? residual, SymInt[] normalized_shape, Tensor? weight, "
      "Tensor? bias, float eps, bool is_layer, bool zero_centered";
  const std::string backward =
      "(Tensor grad_out, Tensor? grad_sum, Tensor input, SymInt[] normalized_shape, "
      "Tensor? weight, Tensor mean, Tensor rstd, bool is_layer, bool zero_centered, "
      "bool[3] output_mask";
  m.def(("_norm" + arguments +
         ", bool with_stats) -> (Tensor out, Tensor sum, Tensor mean, Tensor rstd)")
            .c_str(),
        tags);
  m.def(("_norm_backward" + backward +
         ") -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)")
            .c_str(),
        tags);
  m.def(("_norm_check" + arguments + ") -> ()").c_str(), kernel<check_norm>, tags);
  m.def(("_norm_backward_check" + backward + ") -> ()").c_str(), kernel<check_norm_backward>, tags);
}
