// Linear layers with their epilogue: schemas, checks, and the public operators. Each calls one
// operator, which has the kernels (linear_cuda.cpp; for CPUs and fake tensors
// cudnn_ops/ops/linear.py) and the derivative (linear_autograd.cpp).

#include "ops/linear/linear.h"
#include "ops/autocast.h"
#include "ops/backward_check.h"

#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr const char* kLinear = "cudnn_ops.linear";
constexpr const char* kMlp = "cudnn_ops.mlp";

// One layer's tensors, by the names that they have in the public function.
void check_layer(const char* op, const at::Tensor& input, const char* input_name,
                 const at::Tensor& weight, const char* weight_name, const OptionalTensor& bias,
                 const char* bias_name, const c10::SymInt& columns) {
  TORCH_CHECK_VALUE(weight.dim() == 2, op, ": ", weight_name,
                    " must have 2 dimensions, (outputs, inputs); got ", weight.sym_sizes());
  TORCH_CHECK_TYPE(
      is_computed_in(input.scalar_type()) && weight.scalar_type() == input.scalar_type(), op, ": ",
      input_name, " and ", weight_name,
      " must be of one dtype, float16, bfloat16, float32 or float64; got ", input.scalar_type(),
      " and ", weight.scalar_type());
  TORCH_CHECK_VALUE(weight.device() == input.device(), op, ": ", weight_name, " must be on ",
                    input.device(), ", as ", input_name, "; got ", weight.device());
  TORCH_CHECK_VALUE(columns == weight.sym_size(1), op, ": a ", weight_name, " of ",
                    weight.sym_sizes(), " has ", weight.sym_size(1), " inputs and does not fit ",
                    columns, " columns of an ", input_name, " of ", input.sym_sizes());
  if (!bias) return;
  TORCH_CHECK_TYPE(bias->scalar_type() == input.scalar_type(), op, ": ", bias_name, " must be ",
                   input.scalar_type(), ", as ", input_name, "; got ", bias->scalar_type());
  TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0) &&
                        bias->device() == input.device(),
                    op, ": ", bias_name, " must be [", weight.sym_size(0), "] on ", input.device(),
                    "; got ", bias->sym_sizes(), " on ", bias->device());
}

// Whether a tensor is like a result of the forward with that many columns.
void check_like_result(const char* op, const at::Tensor& tensor, const char* name,
                       const at::Tensor& input, const c10::SymInt& columns) {
  const auto sizes = with_columns(input, columns);
  const auto expected = c10::SymIntArrayRef(sizes);
  TORCH_CHECK_TYPE(tensor.scalar_type() == input.scalar_type(), op, ": ", name, " must be ",
                   input.scalar_type(), ", as input; got ", tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.sym_sizes() == expected && tensor.device() == input.device(), op, ": ",
                    name, " must be ", expected, " on ", input.device(), "; got ",
                    tensor.sym_sizes(), " on ", tensor.device());
}

}  // namespace

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                  std::string_view activation, const OptionalTensor& residual) {
  const Activation kind = activation_of(activation, kLinear);
  const Borrowed<Linear> given(input, weight, bias, residual, static_cast<int64_t>(kind));
  return in_lower_precision(*given, input, [kind](const Linear& args) {
    const bool with_before =
        needs_before(kind, args.residual.has_value()) &&
        torch::autograd::compute_requires_grad(args.input, args.weight, args.bias);
    return std::get<0>(linear_op().call_with(args, with_before));
  });
}

at::Tensor mlp(const at::Tensor& x, const at::Tensor& w1, const OptionalTensor& b1,
               const at::Tensor& w2, const OptionalTensor& b2, std::string_view activation,
               bool gated) {
  const Activation kind = activation_of(activation, kMlp);
  const Borrowed<Mlp> given(x, w1, b1, w2, b2, static_cast<int64_t>(kind), gated);
  return in_lower_precision(*given, x, [](const Mlp& args) {
    const bool is_saved = torch::autograd::compute_requires_grad(
        args.input, args.weight1, args.bias1, args.weight2, args.bias2);
    const auto keep = is_saved ? Keep::kInput : Keep::kNothing;
    return std::get<0>(mlp_op().call_with(args, static_cast<int64_t>(keep)));
  });
}

Keep keep_at(int64_t number) {
  TORCH_CHECK_VALUE(number >= 0 && number <= static_cast<int64_t>(Keep::kSlope),
                    "cudnn_ops.mlp: keep must be 0 (nothing), 1 (what the activation is of) or 2 "
                    "(its slope); got ",
                    number);
  return static_cast<Keep>(number);
}

at::SymDimVector with_columns(const at::Tensor& input, const c10::SymInt& columns) {
  const auto given = input.sym_sizes();
  at::SymDimVector sizes(given.begin(), given.end());
  sizes.back() = columns;
  return sizes;
}

at::Tensor as_matrix(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.dim() == 2) return tensor;
  const auto leading = tensor.sizes().slice(0, static_cast<size_t>(tensor.dim()) - 1);
  return tensor.reshape({c10::multiply_integers(leading), tensor.size(-1)});
}

OptionalTensor as_matrix(const OptionalTensor& tensor) {
  return tensor ? OptionalTensor(as_matrix(*tensor)) : tensor;
}

void check_linear(const Linear& args) {
  args.kind();
  const auto& [input, weight, bias, residual, activation] = args;
  TORCH_CHECK_TYPE(input.defined() && weight.defined(), kLinear,
                   ": input and weight must be tensors, got None");
  TORCH_CHECK_VALUE(input.dim() > 0, kLinear, ": input must have a dimension, got a number");
  check_layer(kLinear, input, "input", weight, "weight", bias, "bias", input.sym_size(-1));
  if (residual) check_like_result(kLinear, *residual, "residual", input, weight.sym_size(0));
}

void check_linear_backward(const LinearBackward& args) {
  constexpr const char* kOp = "cudnn_ops.linear backward";
  const Linear linear = args.forward.linear();
  check_linear(linear);
  const auto& columns = linear.weight.sym_size(0);
  check_like_result(kOp, args.grad_out, "grad_out", linear.input, columns);
  if (linear.kind() == Activation::kNone) return;
  const auto& saved = args.forward.saved;
  TORCH_CHECK_VALUE(saved, kOp, ": an activation needs saved, what it was computed from");
  check_like_result(kOp, *saved, "saved", linear.input, columns);
}

void check_mlp(const Mlp& args) {
  const Activation kind = args.kind();
  const auto& [input, weight1, bias1, weight2, bias2, activation, gated] = args;
  TORCH_CHECK_TYPE(input.defined() && weight1.defined() && weight2.defined(), kMlp,
                   ": x, w1 and w2 must be tensors, got None");
  TORCH_CHECK_VALUE(input.dim() > 0, kMlp, ": x must have a dimension, got a number");
  check_layer(kMlp, input, "x", weight1, "w1", bias1, "b1", input.sym_size(-1));
  auto hidden = weight1.sym_size(0);
  if (gated) {
    TORCH_CHECK_VALUE(
        kind == Activation::kSilu || kind == Activation::kGelu || kind == Activation::kGeluTanh,
        kMlp, ": a gated activation must be one of silu, gelu, gelu_tanh; got \"",
        kActivations[static_cast<size_t>(activation)], "\"");
    TORCH_CHECK_VALUE(hidden % 2 == 0, kMlp,
                      ": w1 of a gated activation must have rows for gate and up, as many of "
                      "each; got ",
                      weight1.sym_sizes());
    hidden = hidden / 2;
  }
  TORCH_CHECK_VALUE(weight2.dim() == 2 && weight2.sym_size(1) == hidden, kMlp,
                    ": w2 must be [out, ", hidden, "] where w1 is ", weight1.sym_sizes(),
                    gated ? " and gated" : "", "; got ", weight2.sym_sizes());
  check_layer(kMlp, input, "x", weight2, "w2", bias2, "b2", hidden);
}

void check_mlp_forward(const MlpForward& args) {
  check_mlp(args.mlp);
  keep_at(args.keep);
}

void check_mlp_backward(const MlpBackward& args) {
  constexpr const char* kOp = "cudnn_ops.mlp backward";
  const Mlp mlp = args.forward.mlp();
  check_mlp(mlp);
  check_like_result(kOp, args.grad_out, "grad_out", mlp.input, mlp.weight2.sym_size(0));
  check_like_result(kOp, args.forward.hidden, "hidden", mlp.input, mlp.weight2.sym_size(1));
  if (!mlp.gated && !needs_before(args.forward.slope(), /*has_residual=*/false)) return;
  const auto& before = args.forward.before;
  TORCH_CHECK_VALUE(before, kOp,
                    ": an activation needs before, what it was computed from, or its slope");
  check_like_result(kOp, *before, "before", mlp.input, mlp.weight1.sym_size(0));
}

const Operator<LinearResults, LinearForward>& linear_op() {
  static const Operator<LinearResults, LinearForward> op("cudnn_ops::_linear");
  return op;
}

const Operator<MlpResults, MlpForward>& mlp_op() {
  static const Operator<MlpResults, MlpForward> op("cudnn_ops::_mlp");
  return op;
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  using namespace cudnn_ops;
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "linear(Tensor input, Tensor weight, Tensor? bias=None, str activation=\"none\", "
      "Tensor? residual=None) -> Tensor",
      linear, tags);
  m.def(
      "mlp(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, str activation=\"gelu\", "
      "bool gated=False) -> Tensor",
      mlp, tags);

  const std::string linear_args =
      "(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, int activation";
  m.def(("_linear" + linear_args + ", bool with_before) -> (Tensor out, Tensor before)").c_str(),
        tags);
  m.def(("_linear_check" + linear_args + ") -> ()").c_str(), kernel<check_linear>, tags);
  const std::string linear_saved =
      "(Tensor grad_out, Tensor input, Tensor weight, Tensor? saved, int activation";
  m.def(("_linear_backward" + linear_saved +
         ", bool[3] output_mask) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)")
            .c_str(),
        tags);
  m.def(("_linear_backward_check" + linear_saved + ") -> ()").c_str(),
        kernel<check_linear_backward>, tags);

  const std::string mlp_args =
      "(Tensor input, Tensor weight1, Tensor? bias1, Tensor weight2, Tensor? bias2, "
      "int activation, bool gated";
  m.def(("_mlp" + mlp_args + ", int keep) -> (Tensor out, Tensor hidden, Tensor before)").c_str(),
        tags);
  m.def(("_mlp_check" + mlp_args + ", int keep=0) -> ()").c_str(), kernel<check_mlp_forward>, tags);
  const std::string mlp_saved =
      "(Tensor grad_out, Tensor input, Tensor weight1, Tensor weight2, Tensor hidden, "
      "Tensor? before, int activation, bool gated";
  m.def(("_mlp_backward" + mlp_saved +
         ", bool[5] output_mask) -> (Tensor grad_input, Tensor grad_weight1, Tensor grad_bias1, "
         "Tensor grad_weight2, Tensor grad_bias2)")
            .c_str(),
        tags);
  m.def(("_mlp_backward_check" + mlp_saved + ") -> ()").c_str(), kernel<check_mlp_backward>, tags);
}
