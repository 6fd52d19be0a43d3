// Instance norm: a group norm with a group for each channel, which may keep running statistics. By
// these alone it is a batch norm, whose operator has the kernels of that.

#include "ops/backward_check.h"
#include "ops/group_norm/group_norm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/silu.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr const char* kInstanceNorm = "cudnn_ops.instance_norm";

// cudnn_ops::instance_norm.
struct InstanceNorm {
  at::Tensor input;
  OptionalTensor running_mean, running_var;
  OptionalTensor weight, bias;
  bool use_input_stats = true;
  double momentum = 0, eps = 0;
  std::string_view activation;
  CUDNN_OPS_FIELDS(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps,
                   activation)
};

void check_statistic(const InstanceNorm& args, const OptionalTensor& statistic, const char* name) {
  if (!statistic) return;
  const auto& input = args.input;
  TORCH_CHECK_VALUE(statistic->dim() == 1 && statistic->sym_size(0) == input.sym_size(1) &&
                        statistic->device() == input.device(),
                    kInstanceNorm, ": ", name, " must be [", input.sym_size(1),
                    "], a number for each of input's channels, on ", input.device(), "; got ",
                    statistic->sym_sizes(), " on ", statistic->device());
  TORCH_CHECK_VALUE(!statistic->requires_grad(), kInstanceNorm, ": ", name,
                    " is changed in place and must not require a gradient");
}

// How many numbers each channel of a sample has.
c10::SymInt positions_of(const at::Tensor& input) {
  c10::SymInt positions = 1;
  for (const auto& size : input.sym_sizes().slice(2)) positions *= size;
  return positions;
}

void check_instance_norm(const InstanceNorm& args) {
  const auto& input = args.input;
  TORCH_CHECK_TYPE(input.defined(), kInstanceNorm, ": input must be a tensor, got None");
  TORCH_CHECK_VALUE(input.dim() >= 2, kInstanceNorm,
                    ": input must be [N, C, ...], with two dimensions or more; got ",
                    input.sym_sizes());
  TORCH_CHECK_VALUE(args.activation == "none" || args.activation == "silu", kInstanceNorm,
                    ": activation must be \"none\" or \"silu\", got \"", args.activation, "\"");
  TORCH_CHECK_VALUE(args.running_mean.has_value() == args.running_var.has_value(), kInstanceNorm,
                    ": running_mean and running_var must be given both, or neither; got ",
                    args.running_mean ? "running_mean" : "running_var", " alone");
  check_statistic(args, args.running_mean, "running_mean");
  check_statistic(args, args.running_var, "running_var");
  TORCH_CHECK_VALUE(args.use_input_stats || args.running_mean, kInstanceNorm,
                    ": running_mean and running_var are missing, by which it norms where "
                    "use_input_stats is False");
  // As torch: one number is its own mean, and its norm is 0 whatever it is.
  TORCH_CHECK_VALUE(!args.use_input_stats || positions_of(input) != 1, kInstanceNorm,
                    ": Expected more than 1 spatial element when training, got input size ",
                    input.sym_sizes());
}

void take_over(const at::Tensor& running, const at::Tensor& of_batch, double momentum) {
  const at::Tensor old = running.to(of_batch.scalar_type());
  running.copy_(old.add(of_batch.sub(old), momentum));
}

// As torch, which takes the mean of what each sample would leave behind.
void update_running(const InstanceNorm& args, const at::Tensor& mean, const at::Tensor& rstd) {
  const at::NoGradGuard no_grad;
  const c10::SymInt positions = positions_of(args.input);
  take_over(*args.running_mean, mean.mean(0), args.momentum);
  const at::Tensor var = rstd.pow(-2).sub(args.eps).mean(0);
  const auto unbiased =
      static_cast<c10::SymFloat>(positions) / static_cast<c10::SymFloat>(positions - 1);
  take_over(*args.running_var, var.mul(at::Scalar(unbiased)), args.momentum);
}

using BatchNormOp = at::Tensor(const at::Tensor&, const OptionalTensor&, const OptionalTensor&,
                               const OptionalTensor&, const OptionalTensor&, bool, double, double,
                               const OptionalTensor&, std::string_view);

at::Tensor by_running_statistics(const InstanceNorm& args) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cudnn_ops::batch_norm", "")
                             .typed<BatchNormOp>();
  const at::Tensor out =
      op.call(args.input, args.running_mean, args.running_var, args.weight, args.bias,
              /*training=*/false, args.momentum, args.eps, /*residual=*/{}, "none");
  return args.activation == "silu" ? at::silu(out) : out;
}

at::Tensor instance_norm(const InstanceNorm& args) {
  check_instance_norm(args);
  if (!args.use_input_stats) return by_running_statistics(args);
  const auto activation = args.activation == "silu" ? Activation::kSilu : Activation::kNone;
  // A channel for each group: as many as there are, which the schema wants as a plain number.
  const int64_t channels = args.input.sym_size(1).guard_int(__FILE__, __LINE__);
  const Borrowed<GroupNorm> norm(args.input, /*residual=*/{}, channels, args.weight, args.bias,
                                 args.eps, static_cast<int64_t>(activation));
  const bool with_stats = args.running_mean.has_value() || torch::autograd::compute_requires_grad(
                                                               args.input, args.weight, args.bias);
  const auto [out, sum, mean, rstd] = group_norm_op().call_with(*norm, with_stats);
  if (args.running_mean && args.input.sym_numel() != 0) update_running(args, mean, rstd);
  return out;
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "instance_norm(Tensor input, Tensor(a!)? running_mean=None, Tensor(b!)? running_var=None, "
      "Tensor? weight=None, Tensor? bias=None, bool use_input_stats=True, float momentum=0.1, "
      "float eps=1e-05, *, str activation=\"none\") -> Tensor",
      cudnn_ops::kernel<cudnn_ops::instance_norm>, tags);
}
