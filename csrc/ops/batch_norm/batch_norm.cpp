// Batch norm: schemas, checks, and the public operator. It calls one of two operators, of which one
// changes the running statistics and the other reads them; these have the kernels
// (batch_norm_cuda.cpp; for CPUs and fake tensors cudnn_ops/ops/batch_norm.py) and the derivative
// (batch_norm_autograd.cpp).

#include "ops/batch_norm/batch_norm.h"
#include "ops/backward_check.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/relu.h>
#include <torch/library.h>

#include <string>

namespace cudnn_ops {
namespace {

void check_vector(const BatchNorm& args, const OptionalTensor& vector, const char* name) {
  if (!vector) return;
  const auto& input = args.input;
  TORCH_CHECK_VALUE(vector->dim() == 1 && vector->sym_size(0) == input.sym_size(1) &&
                        vector->device() == input.device(),
                    kBatchNorm, ": ", name, " must be [", input.sym_size(1),
                    "], a number for each of input's channels, on ", input.device(), "; got ",
                    vector->sym_sizes(), " on ", vector->device());
  const auto dtype = vector->scalar_type();
  TORCH_CHECK_TYPE(dtype == input.scalar_type() || dtype == at::kFloat, kBatchNorm, ": ", name,
                   " must be of the input's dtype, ", input.scalar_type(), ", or float32; got ",
                   dtype);
}

void check_statistics(const BatchNormCall& call) {
  const auto& args = call.norm;
  TORCH_CHECK_VALUE(args.running_mean.has_value() == args.running_var.has_value(), kBatchNorm,
                    ": running_mean and running_var must be given both, or neither; got ",
                    args.running_mean ? "running_mean" : "running_var", " alone");
  check_vector(args, args.running_mean, "running_mean");
  check_vector(args, args.running_var, "running_var");
  if (!call.training) {
    TORCH_CHECK_VALUE(args.running_mean, kBatchNorm,
                      ": running_mean and running_var are missing, by which it norms where "
                      "training is False");
    return;
  }
  for (const auto* statistic : {&args.running_mean, &args.running_var}) {
    TORCH_CHECK_VALUE(!*statistic || !(*statistic)->requires_grad(), kBatchNorm,
                      ": running_mean and running_var are changed in place and must not require "
                      "a gradient; the order of arguments is (input, running_mean, running_var, "
                      "weight, bias), as in torch.nn.functional");
  }
  // As torch: one number is its own mean, and its norm is 0 whatever it is.
  const auto sizes = args.input.sym_sizes();
  c10::SymInt count = sizes[0];
  for (const auto& size : sizes.slice(2)) count *= size;
  TORCH_CHECK_VALUE(count != 1, kBatchNorm,
                    ": Expected more than 1 value per channel when training, got input size ",
                    sizes);
}

// What the forward kept of each channel.
void check_kept(const BatchNormSaved& saved, const at::Tensor& kept, const char* name) {
  const auto& input = saved.input;
  TORCH_CHECK_VALUE(kept.dim() == 1 && kept.sym_size(0) == input.sym_size(1) &&
                        kept.is_contiguous() && kept.scalar_type() == stats_dtype(input) &&
                        kept.device() == input.device(),
                    kBatchNorm, " backward: ", name, " must be what the forward gave, ",
                    stats_dtype(input), " [", input.sym_size(1), "] on ", input.device(), "; got ",
                    kept.scalar_type(), " ", kept.sym_sizes(), " on ", kept.device());
}

at::Tensor run(const BatchNorm& args, bool training) {
  if (!training) return batch_norm_inference_op().call(args);
  return std::get<0>(batch_norm_training_op().call(args));
}

// Autocast mixes dtypes, and torch's `norm + residual` promotes.
bool is_mixed_by_autocast(const BatchNorm& args) {
  if (!args.input.defined() || !args.residual) return false;
  const auto device = args.input.device().type();
  const auto dtype = args.input.scalar_type(), other = args.residual->scalar_type();
  return (device == at::kCUDA || device == at::kCPU) && at::autocast::is_autocast_enabled(device) &&
         dtype != other && is_computed_in(dtype) && is_computed_in(other);
}

// The sum in the dtype that torch's has.
at::Tensor run_mixed(BatchNorm args, bool training) {
  const at::Tensor residual = *args.residual;
  const auto dtype = args.input.scalar_type();
  if (c10::promoteTypes(dtype, residual.scalar_type()) == dtype) {
    args.residual = residual.to(dtype);
    return run(args, training);
  }
  args.residual.reset();
  const bool has_relu = args.has_relu();
  args.activation = static_cast<int64_t>(Activation::kNone);
  const at::Tensor sum = at::add(run(args, training), residual);
  return has_relu ? at::relu(sum) : sum;
}

}  // namespace

at::Tensor batch_norm(const at::Tensor& input, const OptionalTensor& running_mean,
                      const OptionalTensor& running_var, const OptionalTensor& weight,
                      const OptionalTensor& bias, bool training, double momentum, double eps,
                      const OptionalTensor& residual, std::string_view activation) {
  TORCH_CHECK_VALUE(activation == "none" || activation == "relu", kBatchNorm,
                    ": activation must be \"none\" or \"relu\", got \"", activation, "\"");
  const auto kind = activation == "none" ? Activation::kNone : Activation::kRelu;
  const Borrowed<BatchNorm> args(input, running_mean, running_var, weight, bias, residual, momentum,
                                 eps, static_cast<int64_t>(kind));
  return is_mixed_by_autocast(*args) ? run_mixed(*args, training) : run(*args, training);
}

void check_batch_norm(const BatchNormCall& call) {
  const auto& args = call.norm;
  const auto& input = args.input;
  TORCH_CHECK_TYPE(input.defined(), kBatchNorm, ": input must be a tensor, got None");
  TORCH_CHECK_VALUE(input.dim() >= 2, kBatchNorm,
                    ": input must be [N, C, ...], with two dimensions or more; got ",
                    input.sym_sizes());
  TORCH_CHECK_TYPE(is_computed_in(input.scalar_type()), kBatchNorm,
                   ": input must be float16, bfloat16 or float32 (float64 too on a CPU); got ",
                   input.scalar_type());
  TORCH_CHECK_VALUE(args.activation == static_cast<int64_t>(Activation::kNone) || args.has_relu(),
                    kBatchNorm, ": activation must be ", static_cast<int64_t>(Activation::kNone),
                    " or ", static_cast<int64_t>(Activation::kRelu), ", got ", args.activation);
  check_statistics(call);
  check_vector(args, args.weight, "weight");
  check_vector(args, args.bias, "bias");
  if (!args.residual) return;
  TORCH_CHECK_VALUE(
      args.residual->sym_sizes() == input.sym_sizes() && args.residual->device() == input.device(),
      kBatchNorm, ": residual must be of input's shape, ", input.sym_sizes(), ", on ",
      input.device(), "; got ", args.residual->sym_sizes(), " on ", args.residual->device());
  TORCH_CHECK_TYPE(args.residual->scalar_type() == input.scalar_type(), kBatchNorm,
                   ": residual must be of input's dtype, ", input.scalar_type(), "; got ",
                   args.residual->scalar_type());
}

void check_batch_norm_backward(const BatchNormBackward& args) {
  const auto& saved = args.saved;
  BatchNormCall call;
  call.norm.input = saved.input;
  call.norm.weight = saved.weight;
  call.norm.bias = saved.bias;
  call.norm.activation = saved.activation;
  call.training = saved.training;
  if (!saved.training) call.norm.running_mean = call.norm.running_var = saved.mean;
  check_batch_norm(call);
  check_like(args.grad_out, saved.input, kBatchNorm, "grad_out");
  if (args.grad_more) check_like(*args.grad_more, saved.input, kBatchNorm, "grad_more");
  check_kept(saved, saved.mean, "mean");
  check_kept(saved, saved.rstd, "rstd");
  TORCH_CHECK_VALUE(!saved.out || saved.has_relu(), kBatchNorm,
                    " backward: out must be given with ReLU alone");
  TORCH_CHECK_VALUE(saved.out || !saved.has_relu() || saved.training, kBatchNorm,
                    " backward: out must be given with a ReLU of what running statistics norm");
  if (saved.out) check_like(*saved.out, saved.input, kBatchNorm, "out");
}

const Operator<BatchNormResults, BatchNorm>& batch_norm_training_op() {
  static const Operator<BatchNormResults, BatchNorm> op("cudnn_ops::_batch_norm_training");
  return op;
}

const Operator<at::Tensor, BatchNorm>& batch_norm_inference_op() {
  static const Operator<at::Tensor, BatchNorm> op("cudnn_ops::_batch_norm_inference");
  return op;
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  using namespace cudnn_ops;
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "batch_norm(Tensor input, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
      "Tensor? weight=None, Tensor? bias=None, bool training=False, float momentum=0.1, "
      "float eps=1e-05, *, Tensor? residual=None, str activation=\"none\") -> Tensor",
      batch_norm, tags);
  const std::string others =
      "Tensor? weight, Tensor? bias, Tensor? residual, float momentum, float eps, int activation";
  const std::string read = "(Tensor input, Tensor? running_mean, Tensor? running_var, " + others;
  const std::string backward =
      "(Tensor grad_out, Tensor input, Tensor? weight, Tensor? bias, Tensor? out, Tensor mean, "
      "Tensor rstd, bool training, int activation, bool[4] output_mask, "
      "bool params_in_input_dtype, Tensor? grad_more=None";
  m.def(("_batch_norm_training(Tensor input, Tensor(a!)? running_mean, Tensor(b!)? running_var, " +
         others + ") -> (Tensor out, Tensor mean, Tensor rstd)")
            .c_str(),
        tags);
  m.def(("_batch_norm_inference" + read + ") -> Tensor").c_str(), tags);
  m.def(("_batch_norm_backward" + backward +
         ") -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias, Tensor grad_residual)")
            .c_str(),
        tags);
  m.def(("_batch_norm_check" + read + ", bool training) -> ()").c_str(), kernel<check_batch_norm>,
        tags);
  m.def(("_batch_norm_backward_check" + backward + ") -> ()").c_str(),
        kernel<check_batch_norm_backward>, tags);
}
