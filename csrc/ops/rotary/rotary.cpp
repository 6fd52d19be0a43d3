// Rotary position embedding: schemas, checks, the public operators and their derivative, which is a
// rotation back. The CUDA kernels are called in rotary_cuda.cpp; those for CPUs and fake tensors
// are in cudnn_ops/ops/rotary.py.

#include "ops/rotary/rotary.h"
#include "ops/autograd_node.h"
#include "ops/backward_check.h"
#include "ops/check_values.h"

#include <ATen/ops/aminmax.h>
#include <torch/library.h>

#include <array>
#include <numeric>

namespace cudnn_ops {
namespace {

constexpr char kRotaryBackward[] = "RotaryBackward";

const char* name_of(const Rotary& args) {
  return args.key ? "cudnn_ops.rotary_embedding_qk" : "cudnn_ops.rotary_embedding";
}

const Operator<RotaryResults, Rotary>& rotary_op() {
  static const Operator<RotaryResults, Rotary> op("cudnn_ops::_rotary");
  return op;
}

struct Rotation {
  RotaryAngles angles;
  bool is_backward = false;
  CUDNN_OPS_FIELDS(angles, is_backward)
};

// A rotation is linear: its gradient is a rotation back, which can be differentiated again.
variable_list rotary_gradients(const variable_list& grads, const Wanted<2>& wanted,
                               const Rotation& saved) {
  const auto turn = [&](const at::Tensor& grad, const OptionalTensor& other) {
    const auto& [cos, sin, positions, layout] = saved.angles;
    return rotary_op().call_with(grad, other, cos, sin, positions, layout.numbers,
                                 !saved.is_backward);
  };
  variable_list result(2);
  const bool of_input = wanted[0] && grads[0].defined();
  const bool of_key = wanted[1] && grads.size() > 1 && grads[1].defined();
  if (of_input && of_key) {
    std::tie(result[0], result[1]) = turn(grads[0], grads[1]);
  } else if (of_input || of_key) {
    const size_t which = of_key ? 1 : 0;
    result[which] = std::get<0>(turn(grads[which], std::nullopt));
  }
  return result;
}

using RotaryBackwardNode = BackwardNode<kRotaryBackward, rotary_gradients>;

RotaryResults rotary_autograd(c10::DispatchKeySet keys, const Rotary& args) {
  refuse_forward_mode(name_of(args), args);
  const auto& [cos, sin, positions, layout] = args.angles;
  TORCH_CHECK_NOT_IMPLEMENTED(!torch::autograd::compute_requires_grad(cos, sin), name_of(args),
                              ": cos and sin have no gradient here");
  const RotaryResults results = call_below_autograd(rotary_op(), keys, args);
  const auto& [out, key_out] = results;
  if (!args.key) {
    if (torch::autograd::compute_requires_grad(args.input)) {
      set_derivative<RotaryBackwardNode>(
          torch::autograd::collect_next_edges(args.input, at::Tensor()), {out},
          Rotation{args.angles, args.is_backward});
    }
  } else if (torch::autograd::compute_requires_grad(args.input, *args.key)) {
    set_derivative<RotaryBackwardNode>(torch::autograd::collect_next_edges(args.input, *args.key),
                                       {out, key_out}, Rotation{args.angles, args.is_backward});
  }
  return results;
}

// What the public operators are given beside cosines and sines.
RotaryNumbers rotary_layout(bool interleaved, std::optional<int64_t> rotary_dim,
                            at::OptionalIntArrayRef sections, const char* op) {
  TORCH_CHECK_VALUE(!rotary_dim || *rotary_dim > 0, op,
                    ": rotary_dim must be even, from 2 to the size of a head; got ", *rotary_dim);
  TORCH_CHECK_VALUE(!sections || !sections->empty(), op,
                    ": sections must be 1 to 4 numbers of pairs, got []");
  RotaryNumbers numbers{interleaved ? 1 : 0, rotary_dim.value_or(0)};
  if (sections) numbers.append(sections->begin(), sections->end());
  return numbers;
}

void check_inputs(const Rotary& args, const char* op) {
  const auto& input = args.input;
  const char* name = args.key ? "query" : "input";
  TORCH_CHECK_TYPE(is_computed_in(input.scalar_type()), op, ": ", name,
                   " must be float16, bfloat16 or float32 (float64 too on a CPU); got ",
                   input.scalar_type());
  TORCH_CHECK_VALUE(input.dim() == 4 && input.sym_size(3) % 2 == 0, op, ": ", name,
                    " must be [B, H, S, D] with an even D; got ", input.sym_sizes());
  if (!args.key) return;
  const auto& key = *args.key;
  TORCH_CHECK_TYPE(key.scalar_type() == input.scalar_type(), op,
                   ": key must be of the query's dtype, ", input.scalar_type(), "; got ",
                   key.scalar_type());
  TORCH_CHECK_VALUE(key.dim() == 4 && key.sym_size(0) == input.sym_size(0) &&
                        key.sym_size(2) == input.sym_size(2) &&
                        key.sym_size(3) == input.sym_size(3) && key.device() == input.device(),
                    op, ": key must be [B, heads, S, D] for a query ", input.sym_sizes(), " on ",
                    input.device(), "; got ", key.sym_sizes(), " on ", key.device());
}

void check_layout(const RotaryLayout& layout, const at::Tensor& input, const char* op) {
  constexpr size_t kMostSections = 4;
  TORCH_CHECK_VALUE(layout.numbers.size() >= 2, op,
                    ": layout must have two numbers and those of the sections, got ",
                    at::IntArrayRef(layout.numbers));
  const int64_t rotary_dim = layout.rotary_dim();
  TORCH_CHECK_VALUE(
      rotary_dim == 0 || (rotary_dim > 0 && rotary_dim % 2 == 0 && input.sym_size(3) >= rotary_dim),
      op, ": rotary_dim must be even, from 2 to the size of a head, ", input.sym_size(3), "; got ",
      rotary_dim);
  const at::IntArrayRef sections = layout.sections();
  if (sections.empty()) return;
  const int64_t pairs = std::accumulate(sections.begin(), sections.end(), int64_t{0});
  const c10::SymInt turned = rotary_dim == 0 ? input.sym_size(3) : c10::SymInt(rotary_dim);
  TORCH_CHECK_VALUE(sections.size() <= kMostSections &&
                        std::all_of(sections.begin(), sections.end(),
                                    [](int64_t section) { return section > 0; }) &&
                        turned == 2 * pairs,
                    op, ": sections must be 1 to 4 numbers of pairs, whose sum is half of the ",
                    turned, " numbers that turn; got ", sections);
}

// Whether sizes are [B or 1, S] at `dim`, behind a dimension of the sections where there are any.
bool are_of_tokens(const at::Tensor& tensor, int64_t dim, const Rotary& args) {
  const at::IntArrayRef sections = args.angles.layout.sections();
  const bool has_batch =
      tensor.sym_size(dim) == 1 || tensor.sym_size(dim) == args.input.sym_size(0);
  return has_batch && tensor.sym_size(dim + 1) == args.input.sym_size(2) &&
         (sections.empty() || tensor.sym_size(0) == static_cast<int64_t>(sections.size()));
}

void check_factors(const Rotary& args, const char* op) {
  const auto& input = args.input;
  const auto& [cos, sin, positions, layout] = args.angles;
  TORCH_CHECK_TYPE(cos.defined() && sin.defined(), op, ": cos and sin must be tensors, got None");
  TORCH_CHECK_TYPE(
      sin.scalar_type() == cos.scalar_type() &&
          (cos.scalar_type() == input.scalar_type() || cos.scalar_type() == at::kFloat),
      op, ": cos and sin must be of the input's dtype, ", input.scalar_type(), ", or float32; got ",
      cos.scalar_type(), " and ", sin.scalar_type());
  const bool has_sections = !layout.sections().empty(), is_table = positions.has_value();
  const int64_t rotary_dim = layout.rotary_dim(), dims = is_table ? 2 : has_sections ? 4 : 3;
  const auto fits = [&] {
    if (cos.dim() != dims || cos.sym_sizes() != sin.sym_sizes() || cos.device() != input.device() ||
        sin.device() != input.device()) {
      return false;
    }
    const c10::SymInt columns = cos.sym_size(dims - 1);
    return (rotary_dim == 0 ? columns == input.sym_size(3)
                            : columns == rotary_dim || columns == rotary_dim / 2) &&
           (is_table ? cos.sym_size(0) >= 1 : are_of_tokens(cos, dims - 3, args));
  };
  if (fits()) return;
  const char* rows = is_table ? "[N, " : has_sections ? "[sections, B or 1, S, " : "[B or 1, S, ";
  const char* columns = rotary_dim == 0 ? "D]" : "R or R / 2]";
  const char* hint =
      rotary_dim == 0 ? "; rotary_dim allows other columns: those of a part of a head, or of pairs"
                      : "";
  TORCH_CHECK_VALUE(
      false, op, ": cos and sin must be ", rows, columns, " for an input ", input.sym_sizes(),
      " on ", input.device(), has_sections ? c10::str(", sections ", layout.sections()) : "",
      rotary_dim == 0 ? "" : c10::str(", R = rotary_dim = ", rotary_dim), "; got ", cos.sym_sizes(),
      " on ", cos.device(), " and ", sin.sym_sizes(), " on ", sin.device(), hint);
}

void check_positions(const Rotary& args, const char* op) {
  if (!args.angles.positions) return;
  const auto& positions = *args.angles.positions;
  const bool has_sections = !args.angles.layout.sections().empty();
  const int64_t dims = has_sections ? 3 : 2;
  TORCH_CHECK_TYPE(positions.scalar_type() == at::kInt || positions.scalar_type() == at::kLong, op,
                   ": positions must be int32 or int64, got ", positions.scalar_type());
  TORCH_CHECK_VALUE(positions.dim() == dims && are_of_tokens(positions, dims - 2, args) &&
                        positions.device() == args.input.device(),
                    op, ": positions must be ",
                    has_sections ? "[sections, B or 1, S]" : "[B or 1, S]", " for an input ",
                    args.input.sym_sizes(), " on ", args.input.device(), "; got ",
                    positions.sym_sizes(), " on ", positions.device());
  if (!checks_values(positions) || positions.numel() == 0) return;
  const auto [least, most] = positions.aminmax();
  const int64_t rows = args.angles.cos.size(0);
  TORCH_CHECK_VALUE(least.item<int64_t>() >= 0 && most.item<int64_t>() < rows, op,
                    ": positions must be rows of cos and sin, 0 to ", rows - 1, "; got ",
                    least.item<int64_t>(), " to ", most.item<int64_t>());
}

}  // namespace

at::Tensor rotary(const at::Tensor& input, const at::Tensor& cos, const at::Tensor& sin) {
  constexpr std::array<int64_t, 2> kPlain{};
  return std::get<0>(rotary_op().call_with(input, OptionalTensor(), cos, sin, OptionalTensor(),
                                           at::IntArrayRef(kPlain), /*is_backward=*/false));
}

at::Tensor rotary_with_options(const at::Tensor& input, const at::Tensor& cos,
                               const at::Tensor& sin, bool interleaved,
                               std::optional<int64_t> rotary_dim, const OptionalTensor& positions,
                               at::OptionalIntArrayRef sections) {
  const RotaryNumbers layout =
      rotary_layout(interleaved, rotary_dim, sections, "cudnn_ops.rotary_embedding");
  return std::get<0>(rotary_op().call_with(input, OptionalTensor(), cos, sin, positions, layout,
                                           /*is_backward=*/false));
}

RotaryResults rotary_qk(const at::Tensor& query, const at::Tensor& key, const at::Tensor& cos,
                        const at::Tensor& sin, bool interleaved, std::optional<int64_t> rotary_dim,
                        const OptionalTensor& positions, at::OptionalIntArrayRef sections) {
  TORCH_CHECK_TYPE(key.defined(), "cudnn_ops.rotary_embedding_qk: key must be a tensor, got None");
  const RotaryNumbers layout =
      rotary_layout(interleaved, rotary_dim, sections, "cudnn_ops.rotary_embedding_qk");
  return rotary_op().call_with(query, OptionalTensor(key), cos, sin, positions, layout,
                               /*is_backward=*/false);
}

void check_rotary(const Rotary& args) {
  check_rotation(args, name_of(args));
}

void check_rotation(const Rotary& args, const char* op) {
  check_inputs(args, op);
  check_layout(args.angles.layout, args.input, op);
  check_factors(args, op);
  check_positions(args, op);
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  using namespace cudnn_ops;
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  // Two, because Python needs a tenth of a microsecond for options that are not given.
  m.def("rotary_embedding(Tensor input, Tensor cos, Tensor sin) -> Tensor", rotary, tags);
  m.def(
      "rotary_embedding.options(Tensor input, Tensor cos, Tensor sin, *, bool interleaved=False, "
      "int? rotary_dim=None, Tensor? positions=None, int[]? sections=None) -> Tensor",
      rotary_with_options, tags);
  m.def(
      "rotary_embedding_qk(Tensor query, Tensor key, Tensor cos, Tensor sin, *, "
      "bool interleaved=False, int? rotary_dim=None, Tensor? positions=None, "
      "int[]? sections=None) -> (Tensor, Tensor)",
      rotary_qk, tags);
  m.def(
      "_rotary(Tensor input, Tensor? key, Tensor cos, Tensor sin, Tensor? positions, "
      "int[] layout, bool is_backward) -> (Tensor, Tensor)",
      tags);
  m.def(
      "_rotary_check(Tensor input, Tensor? key, Tensor cos, Tensor sin, Tensor? positions, "
      "int[] layout, bool is_backward) -> ()",
      kernel<check_rotary>, tags);
}

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  m.impl("_rotary", cudnn_ops::kernel<cudnn_ops::rotary_autograd>);
}
