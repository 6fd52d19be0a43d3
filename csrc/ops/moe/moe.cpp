// Mixture of experts: schemas, checks and the public operators. Kernels: moe_cuda.cpp and
// grouped_linear_cuda.cpp, those for CPUs and fake tensors in cudnn_ops/ops/moe.py; derivatives:
// moe_autograd.cpp.

#include "ops/moe/moe.h"
#include "kernels/moe_order.h"
#include "ops/autocast.h"
#include "ops/backward_check.h"
#include "ops/check_values.h"

#include <ATen/ops/diff.h>
#include <ATen/ops/max.h>
#include <ATen/ops/min.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr const char* kPermute = "cudnn_ops.moe_permute";
constexpr const char* kCombine = "cudnn_ops.moe_combine";
constexpr const char* kLinear = "cudnn_ops.grouped_linear";

MoePermuted moe_permute(const at::Tensor& input, const at::Tensor& expert_indices,
                        c10::SymInt num_experts) {
  return moe_permute_op().call_with(input, expert_indices, num_experts);
}

at::Tensor moe_combine(const at::Tensor& rows, const at::Tensor& positions,
                       const OptionalTensor& weights) {
  return moe_combine_op().call_with(rows, positions, weights);
}

at::Tensor grouped_linear(const at::Tensor& input, const at::Tensor& weight,
                          const at::Tensor& offsets) {
  const Borrowed<GroupedLinear> given(input, weight, offsets);
  return in_lower_precision(
      *given, input, [](const GroupedLinear& args) { return grouped_linear_op().call_with(args); });
}

// A matrix of a dtype that there are kernels for.
void check_matrix(const at::Tensor& tensor, const char* name, const char* columns, const char* op) {
  TORCH_CHECK_TYPE(is_computed_in(tensor.scalar_type()), op, ": ", name,
                   " must be float16, bfloat16 or float32 (float64 too on a CPU); got ",
                   tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.dim() == 2, op, ": ", name, " must be ", columns, "; got ",
                    tensor.sym_sizes());
}

// [tokens, experts of each], and their places in what that many rows are.
void check_positions(const at::Tensor& positions, const c10::SymInt& rows, const at::Tensor& like,
                     const char* op) {
  TORCH_CHECK_VALUE(positions.scalar_type() == at::kInt && positions.dim() == 2 &&
                        positions.device() == like.device(),
                    op,
                    ": positions must be the int32 tensor [tokens, experts of each] of "
                    "moe_permute, on ",
                    like.device(), "; got ", positions.scalar_type(), " ", positions.sym_sizes(),
                    " on ", positions.device());
  TORCH_CHECK_VALUE(positions.sym_numel() == rows, op, ": there must be a row for each of the ",
                    positions.sym_numel(), " positions, ", positions.sym_sizes(), "; got ", rows,
                    " rows");
  if (!checks_values(positions) || positions.numel() == 0) return;
  const auto least = positions.min().item<int64_t>(), most = positions.max().item<int64_t>();
  const int64_t count = positions.numel();
  TORCH_CHECK_VALUE(least >= -count && most < count, op, ": positions holds ",
                    least < -count ? least : most, ", and there are rows 0 to ", count - 1,
                    " (-1 to ", -count, " for those without an expert)");
}

void check_weights(const at::Tensor& weights, const at::Tensor& positions, const at::Tensor& like,
                   const char* op) {
  TORCH_CHECK_TYPE(
      weights.scalar_type() == like.scalar_type() || weights.scalar_type() == at::kFloat, op,
      ": weights must be ", like.scalar_type(), ", as the rows, or float32; got ",
      weights.scalar_type());
  TORCH_CHECK_VALUE(
      weights.sym_sizes() == positions.sym_sizes() && weights.device() == like.device(), op,
      ": weights must be ", positions.sym_sizes(), " on ", like.device(), ", as positions; got ",
      weights.sym_sizes(), " on ", weights.device());
}

}  // namespace

const Operator<MoePermuted, MoePermute>& moe_permute_op() {
  static const Operator<MoePermuted, MoePermute> op("cudnn_ops::_moe_permute");
  return op;
}

const Operator<at::Tensor, MoeCombine>& moe_combine_op() {
  static const Operator<at::Tensor, MoeCombine> op("cudnn_ops::_moe_combine");
  return op;
}

const Operator<at::Tensor, GroupedLinear>& grouped_linear_op() {
  static const Operator<at::Tensor, GroupedLinear> op("cudnn_ops::_grouped_linear");
  return op;
}

void check_moe_permute(const MoePermute& args) {
  const auto& [input, indices, num_experts] = args;
  TORCH_CHECK_TYPE(input.defined() && indices.defined(), kPermute,
                   ": input and expert_indices must be tensors, got None");
  check_matrix(input, "input", "[tokens, columns]", kPermute);
  TORCH_CHECK_VALUE(num_experts >= 1 && num_experts <= kMostExperts, kPermute,
                    ": num_experts must be 1 to ", kMostExperts, ", got ", num_experts);
  TORCH_CHECK_TYPE(indices.scalar_type() == at::kInt || indices.scalar_type() == at::kLong,
                   kPermute, ": expert_indices must be int32 or int64; got ",
                   indices.scalar_type());
  TORCH_CHECK_VALUE(indices.dim() == 2 && indices.sym_size(0) == input.sym_size(0) &&
                        indices.device() == input.device(),
                    kPermute, ": expert_indices must be [", input.sym_size(0),
                    ", experts of each token] on ", input.device(), " for an input ",
                    input.sym_sizes(), "; got ", indices.sym_sizes(), " on ", indices.device());
  if (!checks_values(indices) || indices.numel() == 0) return;
  const auto least = indices.min().item<int64_t>(), most = indices.max().item<int64_t>();
  TORCH_CHECK_VALUE(least >= -1 && most < num_experts, kPermute, ": expert_indices holds ",
                    least < -1 ? least : most, ", and there are experts 0 to ", num_experts - 1,
                    " (-1 for none)");
}

void check_moe_combine(const MoeCombine& args) {
  const auto& [rows, positions, weights] = args;
  TORCH_CHECK_TYPE(rows.defined() && positions.defined(), kCombine,
                   ": rows and positions must be tensors, got None");
  check_matrix(rows, "rows", "[rows, columns]", kCombine);
  check_positions(positions, rows.sym_size(0), rows, kCombine);
  if (weights) check_weights(*weights, positions, rows, kCombine);
}

void check_moe_combine_backward(const MoeCombineBackward& args) {
  constexpr const char* kOp = "cudnn_ops.moe_combine backward";
  const auto& [grad_out, rows, positions, weights, output_mask] = args;
  check_matrix(grad_out, "grad_out", "[tokens, columns]", kOp);
  check_positions(positions, positions.sym_numel(), grad_out, kOp);
  TORCH_CHECK_VALUE(grad_out.sym_size(0) == positions.sym_size(0), kOp,
                    ": grad_out must have a row for each of the ", positions.sym_size(0),
                    " tokens of positions; got ", grad_out.sym_sizes());
  if (weights) check_weights(*weights, positions, grad_out, kOp);
  if (!output_mask[1]) return;
  TORCH_CHECK_VALUE(weights && rows, kOp,
                    ": the gradient of weights needs weights and rows; got None");
  TORCH_CHECK_TYPE(rows->scalar_type() == grad_out.scalar_type(), kOp, ": rows must be ",
                   grad_out.scalar_type(), ", as grad_out; got ", rows->scalar_type());
  TORCH_CHECK_VALUE(
      rows->dim() == 2 && rows->sym_size(0) == positions.sym_numel() &&
          rows->sym_size(1) == grad_out.sym_size(1) && rows->device() == grad_out.device(),
      kOp, ": rows must be [", positions.sym_numel(), ", ", grad_out.sym_size(1), "] on ",
      grad_out.device(), "; got ", rows->sym_sizes(), " on ", rows->device());
}

void check_grouped_linear(const GroupedLinear& args) {
  const auto& [input, weight, offsets] = args;
  TORCH_CHECK_TYPE(input.defined() && weight.defined() && offsets.defined(), kLinear,
                   ": input, weight and offsets must be tensors, got None");
  check_matrix(input, "input", "[rows, inputs]", kLinear);
  TORCH_CHECK_TYPE(weight.scalar_type() == input.scalar_type(), kLinear, ": weight must be ",
                   input.scalar_type(), ", as input; got ", weight.scalar_type());
  TORCH_CHECK_VALUE(weight.dim() == 3 && weight.sym_size(2) == input.sym_size(1) &&
                        weight.device() == input.device(),
                    kLinear, ": weight must be [groups, outputs, ", input.sym_size(1), "] on ",
                    input.device(), " for an input ", input.sym_sizes(), "; got ",
                    weight.sym_sizes(), " on ", weight.device());
  TORCH_CHECK_VALUE(offsets.scalar_type() == at::kInt && offsets.dim() == 1 &&
                        offsets.sym_size(0) == weight.sym_size(0) &&
                        offsets.device() == input.device(),
                    kLinear, ": offsets must be an int32 tensor [", weight.sym_size(0), "] on ",
                    input.device(), ", where the rows of each group end; got ",
                    offsets.scalar_type(), " ", offsets.sym_sizes(), " on ", offsets.device());
  if (!checks_values(offsets) || offsets.numel() == 0) return;
  const auto first = offsets[0].item<int64_t>(), last = offsets[-1].item<int64_t>();
  TORCH_CHECK_VALUE(first >= 0 && last <= input.size(0) &&
                        (offsets.numel() == 1 || offsets.diff().min().item<int64_t>() >= 0),
                    kLinear, ": offsets must rise from 0 to at most the ", input.size(0),
                    " rows of input; it begins with ", first, " and ends with ", last);
}

void check_grouped_linear_backward(const GroupedLinearBackward& args) {
  constexpr const char* kOp = "cudnn_ops.grouped_linear backward";
  const auto& [input, weight, offsets] = args.forward;
  check_grouped_linear(args.forward);
  TORCH_CHECK_TYPE(args.grad_out.scalar_type() == input.scalar_type(), kOp, ": grad_out must be ",
                   input.scalar_type(), ", as input; got ", args.grad_out.scalar_type());
  TORCH_CHECK_VALUE(args.grad_out.dim() == 2 && args.grad_out.sym_size(0) == input.sym_size(0) &&
                        args.grad_out.sym_size(1) == weight.sym_size(1) &&
                        args.grad_out.device() == input.device(),
                    kOp, ": grad_out must be [", input.sym_size(0), ", ", weight.sym_size(1),
                    "] on ", input.device(), "; got ", args.grad_out.sym_sizes(), " on ",
                    args.grad_out.device());
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  using namespace cudnn_ops;
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  const auto def = [&](const std::string& schema) { m.def(schema.c_str(), tags); };
  const std::string permute = "(Tensor input, Tensor expert_indices, SymInt num_experts) -> ";
  const std::string permuted = "(Tensor rows, Tensor offsets, Tensor positions)";
  m.def(("moe_permute" + permute + permuted).c_str(), moe_permute, tags);
  def("_moe_permute" + permute + permuted);
  m.def(("_moe_permute_check" + permute + "()").c_str(), kernel<check_moe_permute>, tags);

  const std::string combine = "(Tensor rows, Tensor positions, Tensor? weights=None) -> ";
  m.def(("moe_combine" + combine + "Tensor").c_str(), moe_combine, tags);
  def("_moe_combine" + combine + "Tensor");
  m.def(("_moe_combine_check" + combine + "()").c_str(), kernel<check_moe_combine>, tags);
  const std::string combined =
      "(Tensor grad_out, Tensor? rows, Tensor positions, Tensor? weights, bool[2] output_mask) -> ";
  def("_moe_combine_backward" + combined + "(Tensor grad_rows, Tensor grad_weights)");
  m.def(("_moe_combine_backward_check" + combined + "()").c_str(),
        kernel<check_moe_combine_backward>, tags);

  const std::string linear = "Tensor input, Tensor weight, Tensor offsets";
  m.def(("grouped_linear(" + linear + ") -> Tensor").c_str(), grouped_linear, tags);
  def("_grouped_linear(" + linear + ") -> Tensor");
  m.def(("_grouped_linear_check(" + linear + ") -> ()").c_str(), kernel<check_grouped_linear>,
        tags);
  const std::string backward = "(Tensor grad_out, " + linear + ", bool[2] output_mask) -> ";
  def("_grouped_linear_backward" + backward + "(Tensor grad_input, Tensor grad_weight)");
  m.def(("_grouped_linear_backward_check" + backward + "()").c_str(),
        kernel<check_grouped_linear_backward>, tags);
}
