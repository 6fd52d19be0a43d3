// Scaled dot-product attention: schemas, the checks of its arguments, the layout of its
// results. Kernels: sdpa_cuda.cpp here, the CPU and fake ones in cudnn_ops/ops/sdpa.py.

#include "ops/attention/dense/sdpa.h"
#include "ops/attention/check.h"
#include "ops/attention/dense/sdpa_plan_key.h"
#include "ops/attention/dense/sdpa_regular.h"
#include "ops/context_parallel.h"

#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string>

namespace cudnn_ops {
namespace {

constexpr const char* kOp = "cudnn_ops.sdpa: ";

void check_layout(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_TYPE(tensor.defined(), kOp, name, " must be a tensor, got None");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, kOp, name,
                    " must be a dense (strided) tensor, got layout ", tensor.layout(),
                    "; call .to_dense() first");
  TORCH_CHECK_VALUE(tensor.dim() >= 2, kOp, name,
                    " must have at least 2 dimensions, [length, head size], and usually is "
                    "[batch, heads, length, head size]; got shape ",
                    tensor.sym_sizes());
}

void check_same(const at::Tensor& query, const at::Tensor& other, const char* name) {
  TORCH_CHECK_VALUE(query.device() == other.device(), kOp, "query is on ", query.device(), " and ",
                    name, " on ", other.device(), "; move them to one device");
  TORCH_CHECK_TYPE(query.scalar_type() == other.scalar_type(), kOp, "query has dtype ",
                   query.scalar_type(), " and ", name, " ", other.scalar_type(),
                   "; cast them to one dtype");
}

bool broadcasts(const c10::SymInt& a, const c10::SymInt& b) {
  return known(a.sym_eq(b)) || known(a.sym_eq(1)) || known(b.sym_eq(1)) || holds(a.sym_eq(b));
}

c10::SymInt heads_of(const at::Tensor& tensor) {
  return tensor.dim() < 3 ? c10::SymInt(1) : tensor.sym_size(-3);
}

// What to do about heads that do not fit: where the lengths look like heads, they are.
std::string advice_on_heads(const at::Tensor& query, const at::Tensor& other, bool enable_gqa) {
  const c10::SymInt heads = heads_of(query), heads_kv = heads_of(other);
  const bool is_grouped = known(heads_kv.sym_ge(1)) && known((heads % heads_kv).sym_eq(0));
  const c10::SymInt length = query.sym_size(-2), length_kv = other.sym_size(-2);
  const bool fits_transposed =
      query.dim() == 4 && other.dim() == 4 &&
      (known(length.sym_eq(length_kv)) ||
       (enable_gqa && known(length_kv.sym_ge(1)) && known((length % length_kv).sym_eq(0))));
  std::string advice;
  if (fits_transposed && (!is_grouped || known(length.sym_lt(heads_kv)))) {
    advice =
        "; if they are [batch, length, heads, head size], pass query.transpose(1, 2), and key and "
        "value likewise";
  }
  if (enable_gqa)
    return "; with enable_gqa=True the first must be a multiple of the second" + advice;
  if (is_grouped) return "; pass enable_gqa=True for grouped-query attention" + advice;
  return "; they must be equal, or one of them 1" + advice;
}

void check_heads(const at::Tensor& query, const at::Tensor& other, const char* name,
                 bool enable_gqa) {
  const c10::SymInt heads = heads_of(query), heads_other = heads_of(other);
  TORCH_CHECK_VALUE(enable_gqa ? is_multiple(heads, heads_other) : broadcasts(heads, heads_other),
                    kOp, "query has ", heads, " heads and ", name, " ", heads_other,
                    advice_on_heads(query, other, enable_gqa));
}

// The batch size, and the dimensions before it.
void check_batch(const at::Tensor& one, const at::Tensor& other, const char* name,
                 const char* other_name) {
  for (int64_t i = 4; i <= std::min(one.dim(), other.dim()); ++i) {
    const c10::SymInt size = one.sym_size(-i), other_size = other.sym_size(-i);
    TORCH_CHECK_VALUE(broadcasts(size, other_size), kOp, name, " has batch size ", size, " and ",
                      other_name, " ", other_size, "; they must be equal, or one of them 1");
  }
}

}  // namespace

void check_shapes(const Sdpa& args) {
  const auto &query = args.query, &key = args.key, &value = args.value;
  check_layout(query, "query");
  check_layout(key, "key");
  check_layout(value, "value");
  check_same(query, key, "key");
  check_same(query, value, "value");
  TORCH_CHECK_VALUE(holds(query.sym_size(-1).sym_eq(key.sym_size(-1))), kOp, "query has head size ",
                    query.sym_size(-1), " and key ", key.sym_size(-1),
                    "; they must be equal (the value's may differ)");
  TORCH_CHECK_VALUE(holds(key.sym_size(-2).sym_eq(value.sym_size(-2))), kOp, "key has length ",
                    key.sym_size(-2), " and value ", value.sym_size(-2), "; they must be equal");
  check_heads(query, key, "key", args.enable_gqa);
  check_heads(query, value, "value", args.enable_gqa);
  TORCH_CHECK_VALUE(args.enable_gqa || broadcasts(heads_of(key), heads_of(value)), kOp, "key has ",
                    heads_of(key), " heads and value ", heads_of(value),
                    "; they must be equal, or one of them 1");
  check_batch(query, key, "query", "key");
  check_batch(query, value, "query", "value");
  check_batch(key, value, "key", "value");
}

void check_mask(const at::Tensor& mask, const at::Tensor& query, c10::SymIntArrayRef full) {
  const auto dtype = mask.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kBool || dtype == at::kHalf || dtype == at::kBFloat16 ||
                       dtype == at::kFloat || dtype == query.scalar_type(),
                   kOp, "attn_mask has dtype ", dtype,
                   "; it accepts bool (True: attend), or what is added to the scores as float16, "
                   "bfloat16 or float32");
  TORCH_CHECK_VALUE(mask.device() == query.device() && mask.layout() == at::kStrided, kOp,
                    "attn_mask must be a dense tensor on ", query.device(),
                    ", as the query is; it is ", mask.layout(), " on ", mask.device());
  const auto rank = static_cast<int64_t>(full.size());
  bool fits = mask.dim() <= rank;
  for (int64_t i = 1; fits && i <= mask.dim(); ++i) {
    const auto size = mask.sym_size(-i);
    fits = holds(size.sym_eq(1).sym_or(size.sym_eq(full[rank - i])));
  }
  const auto is_of_keys = [&] {
    return mask.dim() == 2 && known(mask.sym_size(0).sym_eq(full[rank - 4])) &&
           known(mask.sym_size(1).sym_eq(full[rank - 1]));
  };
  TORCH_CHECK_VALUE(fits, kOp, "attn_mask of shape ", mask.sym_sizes(),
                    " does not broadcast to [batch, heads, length, length of the keys], ", full,
                    is_of_keys() ? "; one that says which keys each sequence has, [batch, length "
                                   "of the keys], is given as attn_mask[:, None, None, :]"
                                 : "");
}

namespace {

// What is_regular asks for, also of sizes that it could not know.
void check_regular(const Sdpa& args) {
  const auto &query = args.query, &key = args.key, &value = args.value;
  const bool fits = query.dim() == 4 && key.dim() == 4 && value.dim() == 4 &&
                    holds(query.sym_stride(3).sym_eq(1)) && holds(key.sym_stride(3).sym_eq(1)) &&
                    holds(value.sym_stride(3).sym_eq(1)) &&
                    holds(query.sym_size(0).sym_eq(key.sym_size(0))) &&
                    holds(query.sym_size(0).sym_eq(value.sym_size(0))) &&
                    holds(key.sym_size(1).sym_eq(value.sym_size(1))) &&
                    (args.enable_gqa || holds(query.sym_size(1).sym_eq(key.sym_size(1))));
  TORCH_CHECK_VALUE(
      fits, kOp,
      "the kernels require [batch, heads, length, head size] with a last stride of 1, "
      "of one batch size; got ",
      query.sym_sizes(), ", ", key.sym_sizes(), " and ", value.sym_sizes());
}

}  // namespace

void check_sdpa_arguments(const Sdpa& args) {
  const auto &query = args.query, &key = args.key;
  check_options(args, query, kOp);
  if (!fits_plainly(args)) {
    check_shapes(args);
    check_regular(args);
  }
  if (args.attn_mask) {
    const std::array<c10::SymInt, 4> full{query.sym_size(0), query.sym_size(1), query.sym_size(2),
                                          key.sym_size(2)};
    check_mask(*args.attn_mask, query, full);
  }
  check_per_head(args, query, kOp);
  check_seq_lens(args.seq_lens_q, query, query.sym_size(2), "seq_lens_q", kOp);
  check_seq_lens(args.seq_lens_kv, query, key.sym_size(2), "seq_lens_kv", kOp);
}

void check_sdpa(const Sdpa& args) {
  refuse_context_parallel(kOp);
  check_sdpa_arguments(args);
  check_supported(args.query, "query", kOp);
  check_supported(args.key, "key", kOp);
  check_supported(args.value, "value", kOp);
}

void check_sdpa_backward(const SdpaBackward& given) {
  const Sdpa& args = given.args;
  check_sdpa(args);
  const auto& query = args.query;
  const std::array<int64_t, 4> sizes{query.size(0), query.size(1), query.size(2),
                                     args.value.size(3)};
  for (const auto& [tensor, name] :
       {std::pair{&given.grad_out, "grad_out"}, std::pair{&given.out, "out"}}) {
    check_same(query, *tensor, name);
    TORCH_CHECK_VALUE(tensor->sizes() == c10::IntArrayRef(sizes), "cudnn_ops.sdpa backward: ", name,
                      " must have the shape of the output, ", c10::IntArrayRef(sizes), ", got ",
                      tensor->sizes());
  }
  const auto& lse = given.lse;
  TORCH_CHECK_VALUE(lse.sizes() == c10::IntArrayRef(sizes.data(), 3) &&
                        lse.scalar_type() == at::kFloat && lse.device() == query.device(),
                    "cudnn_ops.sdpa backward: lse must be the float32 tensor [batch, heads, "
                    "length] that sdpa_with_lse returned, got ",
                    lse.scalar_type(), " of shape ", lse.sizes(), " on ", lse.device());
  TORCH_CHECK_VALUE(args.dropout_p == 0.0 || args.rng_state,
                    "cudnn_ops.sdpa backward: dropout needs the rng_state of the forward");
}

const Operator<at::Tensor, Sdpa>& sdpa_op() {
  static const Operator<at::Tensor, Sdpa> op("cudnn_ops::sdpa");
  return op;
}

const Operator<OutAndLse, Sdpa>& sdpa_with_lse_op() {
  static const Operator<OutAndLse, Sdpa> op("cudnn_ops::sdpa_with_lse");
  return op;
}

const Operator<Gradients, SdpaBackward>& sdpa_backward_op() {
  static const Operator<Gradients, SdpaBackward> op("cudnn_ops::_sdpa_backward");
  return op;
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  // Results are laid out as their inputs are, so a compiler must hand over the very strides
  // that it traced with.
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
  // The order of Sdpa::fields.
  const std::string first = "Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, ";
  const std::string others =
      "int[2] window_size=[-1, -1], bool bottom_right=False, float softcap=0.0, "
      "Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? seq_lens_q=None, "
      "Tensor? seq_lens_kv=None, bool? deterministic=None, Tensor? rng_state=None";
  const auto list = [&](const char* enable_gqa) {
    return "(Tensor query, Tensor key, Tensor value, " + first +
           "*, float? scale=None, bool enable_gqa=" + enable_gqa + ", " + others;
  };
  const std::string arguments = list("False") + ")";
  m.def(("sdpa" + arguments + " -> Tensor").c_str(), tags);
  m.def(("sdpa_with_lse" + arguments + " -> (Tensor out, Tensor lse)").c_str(), tags);
  m.def(("_sdpa_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
         "Tensor lse, " +
         first + "float? scale=None, " + others +
         ", bool grad_mask=False) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, "
         "Tensor grad_mask, Tensor grad_sinks)")
            .c_str(),
        tags);
  m.def("_attention_rng_state(Tensor query, SymInt length, SymInt length_kv) -> Tensor",
        {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
  // The checks alone, and the way to them, for the kernels that are written in Python.
  m.def(
      "_sdpa_is_regular(Tensor query, Tensor key, Tensor value, bool enable_gqa) -> bool",
      [](const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, bool gqa) {
        return cudnn_ops::is_regular(query, key, value, gqa);
      },
      tags);
  m.def(("_sdpa_as_regular" + arguments + " -> (Tensor out, Tensor lse)").c_str(),
        cudnn_ops::kernel<cudnn_ops::sdpa_with_lse_as_regular>, tags);
  m.def(("_sdpa_check" + arguments + " -> ()").c_str(), cudnn_ops::kernel<cudnn_ops::check_sdpa>,
        tags);
  m.def(("_sdpa_plan_key" + list("True") +
         ", bool with_lse=False, bool backward=False, bool grad_mask=False, "
         "bool polymorphic=False) -> (int[] words, str refusal)")
            .c_str(),
        cudnn_ops::kernel<cudnn_ops::sdpa_plan_key>);
}
