// Attention over packed sequences: schemas and the checks of their arguments. Kernels:
// varlen_cuda.cpp here, the CPU and fake ones in cudnn_ops/ops/varlen.py.

#include "ops/attention/packed/varlen.h"
#include "ops/attention/packed/varlen_plan_key.h"
#include "ops/context_parallel.h"
#include "ops/attention/check.h"
#include "ops/attention/layout.h"

#include <ATen/ops/diff.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr const char* kOp = "cudnn_ops.varlen_attention: ";

void check_packed(const at::Tensor& tensor, const at::Tensor& query, const char* name,
                  const char* op, CheckOperand check) {
  TORCH_CHECK_VALUE(
      tensor.layout() == at::kStrided && tensor.dim() == 3 && holds(tensor.sym_stride(2).sym_eq(1)),
      op, name, " must be [tokens, heads, head size] with a last stride of 1; got ",
      tensor.sym_sizes(), " with strides ", tensor.sym_strides());
  TORCH_CHECK_TYPE(tensor.scalar_type() == query.scalar_type(), op, "q has dtype ",
                   query.scalar_type(), " and ", name, " ", tensor.scalar_type(),
                   "; cast them to one dtype");
  TORCH_CHECK_VALUE(tensor.device() == query.device(), op, "q is on ", query.device(), " and ",
                    name, " on ", tensor.device(), "; move them to one device");
  check(tensor, name, op);
}

void check_used(const OptionalTensor& used, const at::Tensor& offsets, const c10::SymInt& longest,
                const char* name, const char* longest_name, const char* op) {
  if (!used) return;
  TORCH_CHECK_VALUE(holds(longest.sym_ge(0)), op, longest_name, " must not be negative, got ",
                    longest);
  TORCH_CHECK_VALUE(used->dim() == 1 &&
                        holds((used->sym_size(0) + 1).sym_eq(offsets.sym_size(0))) &&
                        used->device() == offsets.device() &&
                        (used->scalar_type() == at::kInt || used->scalar_type() == at::kLong),
                    op, name, " must be an int32 tensor [sequences] on ", offsets.device(),
                    "; got ", used->scalar_type(), " ", used->sym_sizes(), " on ", used->device());
  if (!checks_values(*used) || used->numel() == 0) return;
  TORCH_CHECK_VALUE(used->ge(0).all().item<bool>() && used->le(offsets.diff()).all().item<bool>(),
                    op, name, " must lie between 0 and the length of each sequence");
  const auto most = used->max().item<int64_t>();
  TORCH_CHECK_VALUE(longest >= most, op, longest_name, " is ", longest, ", and ", name, " has ",
                    most);
}

}  // namespace

void check_varlen(const Varlen& args) {
  check_packed_call(args, kOp, check_supported);
}

void check_packed_call(const Varlen& args, const char* op, CheckOperand check) {
  refuse_context_parallel(op);
  const auto &query = args.query, &key = args.key, &value = args.value;
  check_options(args, query, op);
  check_packed(query, query, "q", op, check);
  check_packed(key, query, "k", op, check);
  check_packed(value, query, "v", op, check);
  TORCH_CHECK_VALUE(holds(query.sym_size(2).sym_eq(key.sym_size(2))), op, "q has head size ",
                    query.sym_size(2), " and k ", key.sym_size(2), "; they must be equal");
  TORCH_CHECK_VALUE(holds(key.sym_size(0).sym_eq(value.sym_size(0))) &&
                        holds(key.sym_size(1).sym_eq(value.sym_size(1))),
                    op, "k is ", key.sym_sizes(), " and v ", value.sym_sizes(),
                    "; tokens and heads must be equal");
  TORCH_CHECK_VALUE(is_multiple(query.sym_size(1), key.sym_size(1)), op, "q has ",
                    query.sym_size(1), " heads and k ", key.sym_size(1),
                    "; the first must be a multiple of the second");
  check_per_head(args, query, op);
  // The longest is that of the tokens that are used.
  check_offsets(args.cu_seqlens_q, query, args.seqused_q ? query.sym_size(0) : args.max_seqlen_q,
                "cu_seqlens_q", "max_seqlen_q", op);
  check_offsets(args.cu_seqlens_k, key, args.seqused_k ? key.sym_size(0) : args.max_seqlen_k,
                "cu_seqlens_k", "max_seqlen_k", op);
  TORCH_CHECK_VALUE(holds(args.cu_seqlens_q.sym_size(0).sym_eq(args.cu_seqlens_k.sym_size(0))), op,
                    "cu_seqlens_q is of ", args.cu_seqlens_q.sym_size(0) - 1,
                    " sequences and cu_seqlens_k of ", args.cu_seqlens_k.sym_size(0) - 1);
  check_used(args.seqused_q, args.cu_seqlens_q, args.max_seqlen_q, "seqused_q", "max_seqlen_q", op);
  check_used(args.seqused_k, args.cu_seqlens_k, args.max_seqlen_k, "seqused_k", "max_seqlen_k", op);
}

bool is_regular(const Varlen& args) {
  return has_regular_rows(args.query) && has_regular_rows(args.key) && has_regular_rows(args.value);
}

OutAndLse varlen_with_lse_as_regular(const Varlen& given) {
  Varlen args = given;
  for (auto* tensor : {&args.query, &args.key, &args.value}) *tensor = with_regular_rows(*tensor);
  args.scale = scale_of_rows(given.scale, given.query);
  const auto [out, lse] = varlen_with_lse_op().call(args);
  return {out.narrow_symint(-1, 0, given.value.sym_size(-1)), lse};
}

at::Tensor varlen_as_regular(const Varlen& given) {
  return std::get<0>(varlen_with_lse_as_regular(given));
}

const Operator<at::Tensor, Varlen>& varlen_op() {
  static const Operator<at::Tensor, Varlen> op("cudnn_ops::varlen_attention");
  return op;
}

const Operator<OutAndLse, Varlen>& varlen_with_lse_op() {
  static const Operator<OutAndLse, Varlen> op("cudnn_ops::varlen_attention_with_lse");
  return op;
}

const Operator<VarlenGradients, VarlenBackward>& varlen_backward_op() {
  static const Operator<VarlenGradients, VarlenBackward> op("cudnn_ops::_varlen_backward");
  return op;
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
  const std::string offsets =
      "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
      "float dropout_p=0.0, float? softmax_scale=None, bool causal=False, ";
  const std::string options =
      "int[2] window_size=[-1, -1], float softcap=0.0, Tensor? alibi_slopes=None, "
      "Tensor? sinks=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
      "bool bottom_right=True, bool? deterministic=None, Tensor? rng_state=None";
  const std::string arguments = "(Tensor q, Tensor k, Tensor v, " + offsets + "*, " + options + ")";
  m.def(("varlen_attention" + arguments + " -> Tensor").c_str(), tags);
  m.def(("varlen_attention_with_lse" + arguments + " -> (Tensor out, Tensor lse)").c_str(), tags);
  m.def(
      ("_varlen_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, " +
       offsets + options + ") -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_sinks)")
          .c_str(),
      tags);
  m.def(
      "_varlen_is_regular(Tensor q, Tensor k, Tensor v) -> bool",
      [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
        return cudnn_ops::has_regular_rows(q) && cudnn_ops::has_regular_rows(k) &&
               cudnn_ops::has_regular_rows(v);
      },
      tags);
  m.def(("_varlen_as_regular" + arguments + " -> (Tensor out, Tensor lse)").c_str(),
        cudnn_ops::kernel<cudnn_ops::varlen_with_lse_as_regular>, tags);
  m.def(("_varlen_check" + arguments + " -> ()").c_str(),
        cudnn_ops::kernel<cudnn_ops::check_varlen>, tags);
  m.def(("_varlen_plan_key(Tensor q, Tensor k, Tensor v, " + offsets + "*, " + options +
         ", bool with_lse=False, bool backward=False, int sm_major=9) -> int[]")
            .c_str(),
        cudnn_ops::kernel<cudnn_ops::varlen_plan_key>);
}
