// Layer norm and RMS norm: schemas, the checks of their arguments, and the public operators, which
// are made of one operator with a kernel and a derivative (norm_cuda.cpp, norm_autograd.cpp; the
// CPU and fake kernels are in cudnn_ops/ops/norm.py).

#include "ops/norm/norm.h"
#include "ops/backward_check.h"

#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <limits>

namespace cudnn_ops {
namespace {

void check_parameter(const Norm& args, const OptionalTensor& parameter, const char* name) {
  if (!parameter) return;
  TORCH_CHECK_VALUE(
      parameter->sym_sizes() == args.normalized_shape && parameter->device() == args.input.device(),
      name_of(args), ": ", name, " must be of normalized_shape, ", args.normalized_shape, ", on ",
      args.input.device(), "; got ", parameter->sym_sizes(), " on ", parameter->device());
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

// torch takes the machine epsilon of what it computes in where none is given.
double default_eps(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                            : std::numeric_limits<float>::epsilon();
}

NormResults norm(const Norm& args) {
  const bool with_stats =
      torch::autograd::compute_requires_grad(args.input, args.residual, args.weight, args.bias);
  return norm_op().call(args.input, args.residual, args.normalized_shape, args.weight, args.bias,
                        args.eps, args.is_layer, args.zero_centered, with_stats);
}

const OptionalTensor kNone;

at::Tensor rms_norm(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                    const OptionalTensor& weight, std::optional<double> eps, bool zero_centered) {
  return std::get<0>(norm({input, kNone, normalized_shape, weight, kNone,
                           eps.value_or(default_eps(input)), /*is_layer=*/false, zero_centered}));
}

at::Tensor layer_norm(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                      const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                      bool zero_centered) {
  return std::get<0>(
      norm({input, kNone, normalized_shape, weight, bias, eps, /*is_layer=*/true, zero_centered}));
}

// Python's None comes as a tensor that is undefined.
const at::Tensor& given(const at::Tensor& residual, const char* op) {
  TORCH_CHECK_TYPE(residual.defined(), op, ": residual must be a tensor, got None");
  return residual;
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& input, const at::Tensor& residual,
                                                c10::SymIntArrayRef normalized_shape,
                                                const OptionalTensor& weight,
                                                std::optional<double> eps, bool zero_centered) {
  const OptionalTensor other = given(residual, "cudnn_ops.add_rms_norm");
  auto [out, sum, mean, rstd] =
      norm({input, other, normalized_shape, weight, kNone, eps.value_or(default_eps(input)),
            /*is_layer=*/false, zero_centered});
  return {std::move(out), std::move(sum)};
}

std::tuple<at::Tensor, at::Tensor> add_layer_norm(
    const at::Tensor& input, const at::Tensor& residual, c10::SymIntArrayRef normalized_shape,
    const OptionalTensor& weight, const OptionalTensor& bias, double eps, bool zero_centered) {
  const OptionalTensor other = given(residual, "cudnn_ops.add_layer_norm");
  auto [out, sum, mean, rstd] =
      norm({input, other, normalized_shape, weight, bias, eps, /*is_layer=*/true, zero_centered});
  return {std::move(out), std::move(sum)};
}

void norm_backward_check(const at::Tensor& grad_out, const OptionalTensor& grad_sum,
                         const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                         const OptionalTensor& weight, const at::Tensor& mean,
                         const at::Tensor& rstd, bool is_layer, bool zero_centered,
                         std::array<bool, 3> output_mask) {
  check_norm_backward({input, kNone, normalized_shape, weight, kNone, 0, is_layer, zero_centered},
                      grad_out, grad_sum, mean, rstd, output_mask);
}

void norm_check(const at::Tensor& input, const OptionalTensor& residual,
                c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                const OptionalTensor& bias, double eps, bool is_layer, bool zero_centered) {
  check_norm({input, residual, normalized_shape, weight, bias, eps, is_layer, zero_centered});
}

}  // namespace

const char* name_of(const Norm& args) {
  if (args.residual) return args.is_layer ? "cudnn_ops.add_layer_norm" : "cudnn_ops.add_rms_norm";
  return args.is_layer ? "cudnn_ops.layer_norm" : "cudnn_ops.rms_norm";
}

void check_norm(const Norm& args) {
  const auto& input = args.input;
  TORCH_CHECK_TYPE(input.defined(), name_of(args), ": input must be a tensor, got None");
  const auto dims = static_cast<int64_t>(args.normalized_shape.size());
  TORCH_CHECK_VALUE(dims >= 1, name_of(args),
                    ": normalized_shape must have at least one number, the last dimension's size");
  TORCH_CHECK_VALUE(
      input.dim() >= dims && input.sym_sizes().slice(input.dim() - dims) == args.normalized_shape,
      name_of(args), ": input must end with normalized_shape, ", args.normalized_shape, "; got ",
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

void check_norm_backward(const Norm& args, const at::Tensor& grad_out,
                         const OptionalTensor& grad_sum, const at::Tensor& mean,
                         const at::Tensor& rstd, std::array<bool, 3> output_mask) {
  check_norm(args);
  const auto& input = args.input;
  check_like(grad_out, input, name_of(args), "grad_out");
  if (grad_sum) check_like(*grad_sum, input, name_of(args), "grad_sum");
  c10::SymInt rows = 1;
  const auto leading = input.dim() - static_cast<int64_t>(args.normalized_shape.size());
  for (const auto& size : input.sym_sizes().slice(0, leading)) rows *= size;
  check_stats(args, rstd, rows, "rstd");
  if (args.is_layer) check_stats(args, mean, rows, "mean");
  TORCH_CHECK_VALUE(args.is_layer || !output_mask[2], name_of(args),
                    " backward: output_mask asks for the gradient of a bias, and there is none");
}

const c10::TypedOperatorHandle<NormOp>& norm_op() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("cudnn_ops::_norm", "").typed<NormOp>();
  return op;
}

const c10::TypedOperatorHandle<NormBackwardOp>& norm_backward_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cudnn_ops::_norm_backward", "")
                             .typed<NormBackwardOp>();
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
      "Tensor? bias, float eps, "
      "bool is_layer, bool zero_centered";
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
  m.def(("_norm_check" + arguments + ") -> ()").c_str(), norm_check, tags);
  m.def(("_norm_backward_check" + backward + ") -> ()").c_str(), norm_backward_check, tags);
}
