// Adaptive layer norm and RMS norm: schemas, checks, and the public operators. These call one
// operator, which has the kernels (adaptive_norm_cuda.cpp; for CPUs and fake tensors
// cudnn_ops/ops/adaptive_norm.py) and the derivative (adaptive_norm_autograd.cpp).

#include "ops/adaptive_norm/adaptive_norm.h"
#include "ops/autocast.h"
#include "ops/backward_check.h"

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

bool has_dtype_of(const at::Tensor& tensor, const AdaptiveNorm& args) {
  const auto dtype = tensor.scalar_type();
  return dtype == args.input.scalar_type() || dtype == at::kFloat;
}

void check_dtype(const AdaptiveNorm& args, const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_TYPE(has_dtype_of(tensor, args), name_of(args), ": ", name,
                   " must be of the input's dtype, ", args.input.scalar_type(),
                   ", or float32; got ", tensor.scalar_type());
}

void check_parameter(const AdaptiveNorm& args, const OptionalTensor& parameter, const char* name) {
  if (!parameter) return;
  const auto columns = args.input.sym_sizes().back();
  TORCH_CHECK_VALUE(parameter->dim() == 1 && parameter->sym_size(0) == columns &&
                        parameter->device() == args.input.device(),
                    name_of(args), ": ", name, " must be [", columns, "], a number for each of ",
                    "input's last dimension, on ", args.input.device(), "; got ",
                    parameter->sym_sizes(), " on ", parameter->device());
  check_dtype(args, *parameter, name);
}

// [B, C], or of as many dimensions as the input and broadcast over some but the last.
bool is_broadcast(const at::Tensor& modulation, const at::Tensor& input) {
  const auto sizes = modulation.sym_sizes(), like = input.sym_sizes();
  if (sizes.size() != like.size() && sizes.size() != 2) return false;
  const size_t last = sizes.size() - 1;
  if (sizes[last] != like.back()) return false;
  for (size_t dim = 0; dim < last; ++dim) {
    if (sizes[dim] != like[dim] && sizes[dim] != 1) return false;
  }
  return true;
}

void check_modulation(const AdaptiveNorm& args, const OptionalTensor& modulation,
                      const char* name) {
  if (!modulation) return;
  const auto sizes = args.input.sym_sizes();
  TORCH_CHECK_VALUE(
      is_broadcast(*modulation, args.input) && modulation->device() == args.input.device(),
      name_of(args), ": ", name, " must be [", sizes[0], ", ", sizes.back(),
      "], numbers for each of input's samples, or have as many dimensions as input, ", sizes,
      ", each of its size or 1 and the last one ", sizes.back(), ", on ", args.input.device(),
      "; got ", modulation->sym_sizes(), " on ", modulation->device());
  check_dtype(args, *modulation, name);
}

// What the forward kept of each row.
void check_stats(const AdaptiveNorm& args, const at::Tensor& stats, const char* name) {
  const auto dtype = args.input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto rows = args.input.sym_sizes().slice(0, args.input.sym_sizes().size() - 1);
  TORCH_CHECK_VALUE(stats.sym_sizes() == rows && stats.is_contiguous() &&
                        stats.scalar_type() == dtype && stats.device() == args.input.device(),
                    name_of(args), " backward: ", name, " must be what the forward gave, ", dtype,
                    " ", rows, " on ", args.input.device(), "; got ", stats.scalar_type(), " ",
                    stats.sym_sizes(), " on ", stats.device());
}

// Autocast mixes dtypes, and torch's arithmetic promotes: so does a call whose tensors would be
// refused without autocast, all of which are cast to what the sum or the product has in torch.
std::optional<at::ScalarType> promoted_by_autocast(const AdaptiveNorm& args) {
  const auto device = args.input.device().type();
  if (device != at::kCUDA && device != at::kCPU) return std::nullopt;
  if (!at::autocast::is_autocast_enabled(device)) return std::nullopt;
  // As torch's layer_norm on CUDA; on a CPU that has no rule, and neither has RMS norm.
  if (args.is_layer && !args.update && device == at::kCUDA) return at::kFloat;
  auto dtype = args.input.scalar_type();
  bool is_mixed = args.update && args.update->scalar_type() != dtype;
  for (const auto* tensor : {&args.gate, &args.scale, &args.shift, &args.weight, &args.bias}) {
    is_mixed = is_mixed || (*tensor && !has_dtype_of(**tensor, args));
  }
  if (!is_mixed) return std::nullopt;
  for (const auto* tensor : {&args.update, &args.gate, &args.scale, &args.shift}) {
    if (!*tensor) continue;
    if (!is_computed_in((*tensor)->scalar_type())) return std::nullopt;
    dtype = c10::promoteTypes(dtype, (*tensor)->scalar_type());
  }
  return dtype;
}

AdaptiveNormResults adaptive_norm(const AdaptiveNorm& args) {
  const bool with_stats = torch::autograd::compute_requires_grad(
      args.input, args.update, args.gate, args.scale, args.shift, args.weight, args.bias);
  return adaptive_norm_op().call_with(args, with_stats);
}

AdaptiveNormResults adaptive_norm_or_promoted(const AdaptiveNorm& args) {
  // Python's None arrives as an undefined tensor.
  const auto dtype = args.input.defined() ? promoted_by_autocast(args) : std::nullopt;
  if (!dtype) return adaptive_norm(args);
  AdaptiveNorm casted = args;
  cast(casted, *dtype, args.input.device().type());
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return adaptive_norm(casted);
}

void require(const at::Tensor& tensor, const char* op, const char* name) {
  TORCH_CHECK_TYPE(tensor.defined(), op, ": ", name, " must be a tensor, got None");
}

}  // namespace

at::Tensor adaptive_layer_norm(const at::Tensor& input, const at::Tensor& scale,
                               const at::Tensor& shift, const OptionalTensor& weight,
                               const OptionalTensor& bias, double eps) {
  require(scale, "cudnn_ops.adaptive_layer_norm", "scale");
  require(shift, "cudnn_ops.adaptive_layer_norm", "shift");
  const Borrowed<AdaptiveNorm> args(input, /*update=*/{}, /*gate=*/{}, scale, shift, weight, bias,
                                    eps, /*is_layer=*/true);
  return std::get<0>(adaptive_norm_or_promoted(*args));
}

at::Tensor adaptive_rms_norm(const at::Tensor& input, const at::Tensor& scale,
                             const OptionalTensor& shift, const OptionalTensor& weight,
                             double eps) {
  require(scale, "cudnn_ops.adaptive_rms_norm", "scale");
  const Borrowed<AdaptiveNorm> args(input, /*update=*/{}, /*gate=*/{}, scale, shift, weight,
                                    /*bias=*/{}, eps, /*is_layer=*/false);
  return std::get<0>(adaptive_norm_or_promoted(*args));
}

namespace {

std::tuple<at::Tensor, at::Tensor> out_and_sum(const AdaptiveNorm& args) {
  require(*args.update, name_of(args), "update");
  require(*args.gate, name_of(args), "gate");
  auto [out, sum, mean, rstd] = adaptive_norm_or_promoted(args);
  return {std::move(out), std::move(sum)};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> gate_add_adaptive_layer_norm(
    const at::Tensor& input, const at::Tensor& update, const at::Tensor& gate,
    const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& weight,
    const OptionalTensor& bias, double eps) {
  const Borrowed<AdaptiveNorm> args(input, update, gate, scale, shift, weight, bias, eps,
                                    /*is_layer=*/true);
  return out_and_sum(*args);
}

std::tuple<at::Tensor, at::Tensor> gate_add_adaptive_rms_norm(
    const at::Tensor& input, const at::Tensor& update, const at::Tensor& gate,
    const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& weight,
    double eps) {
  const Borrowed<AdaptiveNorm> args(input, update, gate, scale, shift, weight, /*bias=*/{}, eps,
                                    /*is_layer=*/false);
  return out_and_sum(*args);
}

const char* name_of(const AdaptiveNorm& args) {
  if (args.is_layer) {
    return args.update ? "cudnn_ops.gate_add_adaptive_layer_norm" : "cudnn_ops.adaptive_layer_norm";
  }
  return args.update ? "cudnn_ops.gate_add_adaptive_rms_norm" : "cudnn_ops.adaptive_rms_norm";
}

void check_adaptive_norm(const AdaptiveNorm& args) {
  const auto& input = args.input;
  const char* op = name_of(args);
  TORCH_CHECK_TYPE(input.defined(), op, ": input must be a tensor, got None");
  TORCH_CHECK_VALUE(input.dim() >= 2, op, ": input must be [B, ..., C], with two dimensions or ",
                    "more; got ", input.sym_sizes());
  TORCH_CHECK_TYPE(is_computed_in(input.scalar_type()), op,
                   ": input must be float16, bfloat16 or float32 (float64 too on a CPU); got ",
                   input.scalar_type());
  TORCH_CHECK_VALUE(args.update.has_value() == args.gate.has_value(), op,
                    ": update and gate go together; got one of them");
  if (args.update) {
    TORCH_CHECK_VALUE(
        args.update->sym_sizes() == input.sym_sizes() && args.update->device() == input.device(),
        op, ": update must be of input's shape, ", input.sym_sizes(), ", on ", input.device(),
        "; got ", args.update->sym_sizes(), " on ", args.update->device());
    TORCH_CHECK_TYPE(args.update->scalar_type() == input.scalar_type(), op,
                     ": update must be of input's dtype, ", input.scalar_type(), "; got ",
                     args.update->scalar_type());
  }
  check_modulation(args, args.gate, "gate");
  check_modulation(args, args.scale, "scale");
  check_modulation(args, args.shift, "shift");
  check_parameter(args, args.weight, "weight");
  check_parameter(args, args.bias, "bias");
  TORCH_CHECK_VALUE(args.is_layer || !args.bias, op, ": an RMS norm has no bias");
}

void check_adaptive_norm_backward(const AdaptiveNormBackward& args) {
  const AdaptiveNorm norm = args.saved.norm();
  check_adaptive_norm(norm);
  const char* op = name_of(norm);
  check_like(args.grad_out, norm.input, op, "grad_out");
  if (args.grad_sum) check_like(*args.grad_sum, norm.input, op, "grad_sum");
  if (norm.is_layer) check_stats(norm, args.saved.mean, "mean");
  check_stats(norm, args.saved.rstd, "rstd");
  const OptionalTensor* inputs[] = {&norm.update, &norm.gate,   &norm.scale,
                                    &norm.shift,  &norm.weight, &norm.bias};
  for (size_t i = 1; i < kAdaptiveNormInputs; ++i) {
    TORCH_CHECK_VALUE(*inputs[i - 1] || !args.output_mask[i], op,
                      " backward: output_mask asks for the gradient of a tensor that is not there");
  }
}

const Operator<AdaptiveNormResults, AdaptiveNormForward>& adaptive_norm_op() {
  static const Operator<AdaptiveNormResults, AdaptiveNormForward> op("cudnn_ops::_adaptive_norm");
  return op;
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  using namespace cudnn_ops;
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "adaptive_layer_norm(Tensor input, Tensor scale, Tensor shift, *, Tensor? weight=None, "
      "Tensor? bias=None, float eps=1e-06) -> Tensor",
      adaptive_layer_norm, tags);
  m.def(
      "adaptive_rms_norm(Tensor input, Tensor scale, Tensor? shift=None, *, Tensor? weight=None, "
      "float eps=1e-06) -> Tensor",
      adaptive_rms_norm, tags);
  m.def(
      "gate_add_adaptive_layer_norm(Tensor input, Tensor update, Tensor gate, Tensor? scale=None, "
      "Tensor? shift=None, *, Tensor? weight=None, Tensor? bias=None, float eps=1e-06) -> "
      "(Tensor out, Tensor sum)",
      gate_add_adaptive_layer_norm, tags);
  m.def(
      "gate_add_adaptive_rms_norm(Tensor input, Tensor update, Tensor gate, Tensor? scale=None, "
      "Tensor? shift=None, *, Tensor? weight=None, float eps=1e-06) -> (Tensor out, Tensor sum)",
      gate_add_adaptive_rms_norm, tags);
  const std::string tensors =
      "Tensor input, Tensor? update, Tensor? gate, Tensor? scale, Tensor? shift, Tensor? weight, "
      "Tensor? bias, ";
  const std::string arguments = "(" + tensors + "float eps, bool is_layer";
  const std::string backward = "(Tensor grad_out, Tensor? grad_sum, " + tensors +
                               "Tensor mean, Tensor rstd, bool is_layer, bool[7] output_mask";
  m.def(("_adaptive_norm" + arguments +
         ", bool with_stats) -> (Tensor out, Tensor sum, Tensor mean, Tensor rstd)")
            .c_str(),
        tags);
  m.def(("_adaptive_norm_backward" + backward +
         ") -> (Tensor grad_input, Tensor grad_update, Tensor grad_gate, Tensor grad_scale, "
         "Tensor grad_shift, Tensor grad_weight, Tensor grad_bias)")
            .c_str(),
        tags);
  m.def(("_adaptive_norm_check" + arguments + ") -> ()").c_str(), kernel<check_adaptive_norm>,
        tags);
  m.def(("_adaptive_norm_backward_check" + backward + ") -> ()").c_str(),
        kernel<check_adaptive_norm_backward>, tags);
}
