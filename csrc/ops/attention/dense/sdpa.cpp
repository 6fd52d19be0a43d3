// Scaled dot-product attention: schemas, the checks of its arguments, the layout of its
// results. Kernels: sdpa_cuda.cpp here, the CPU and fake ones in cudnn_ops/ops/sdpa.py.

#include "ops/attention/dense/sdpa.h"
#include "ops/context_parallel.h"
#include "ops/attention/dense/sdpa_call.h"
#include "ops/attention/check.h"
#include "ops/attention/dense/sdpa_regular.h"

#include <ATen/ops/max.h>
#include <ATen/ops/min.h>
#include <ATen/ops/diff.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

namespace cudnn_ops {
namespace {

constexpr const char* kOp = "cudnn_ops.sdpa: ";

bool is_attention_dtype(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  if (dtype == at::kHalf || dtype == at::kBFloat16) return true;
  return !tensor.is_cuda() && (dtype == at::kFloat || dtype == at::kDouble);
}

}  // namespace

bool checks_values() {
  const char* value = std::getenv("CUDNN_OPS_CHECK");
  return value != nullptr && std::strcmp(value, "") != 0 && std::strcmp(value, "0") != 0;
}

bool checks_values(const at::Tensor& tensor) {
  // A compiler's tensors, subclasses of torch.Tensor, have none.
  if (tensor.is_meta() || tensor.unsafeGetTensorImpl()->is_python_dispatch()) return false;
  return tensor.is_cpu() || checks_values();
}

bool is_multiple(const c10::SymInt& heads, const c10::SymInt& of) {
  if (known(of.sym_eq(0))) return known(heads.sym_eq(0));
  return holds(of.sym_ge(1)) && holds((heads % of).sym_eq(0));
}

void check_supported(const at::Tensor& tensor, const char* name, const char* op) {
  TORCH_CHECK_TYPE(is_attention_dtype(tensor), op, name, " has dtype ", tensor.scalar_type(),
                   "; on a GPU it takes float16 and bfloat16 (use torch.autocast or "
                   ".bfloat16()), on a CPU float32 and float64 too");
  const auto head_size = tensor.sym_size(-1);
  TORCH_CHECK_VALUE(holds((head_size % 8).sym_eq(0)) && holds(head_size.sym_ge(8)), op,
                    "the head size of ", name, " is ", head_size,
                    "; cuDNN takes multiples of 8 from 8 on: pad the last dimension with zeros");
}

void check_per_head(const at::Tensor& tensor, const at::Tensor& query, const char* name,
                    const char* op, int64_t head_dim) {
  const c10::SymInt heads = query.sym_size(head_dim);
  TORCH_CHECK_VALUE(tensor.dim() == 1 && holds(tensor.sym_size(0).sym_eq(heads)) &&
                        tensor.device() == query.device() && tensor.is_floating_point(),
                    op, name, " must hold one floating-point number for each query head, [", heads,
                    "] on ", query.device(), "; got ", tensor.scalar_type(), " ",
                    tensor.sym_sizes(), " on ", tensor.device());
}

void check_offsets(const at::Tensor& offsets, const at::Tensor& packed, const c10::SymInt& longest,
                   const char* name, const char* longest_name, const char* op) {
  TORCH_CHECK_VALUE(offsets.dim() == 1 && holds(offsets.sym_size(0).sym_ge(1)) &&
                        offsets.device() == packed.device() &&
                        (offsets.scalar_type() == at::kInt || offsets.scalar_type() == at::kLong),
                    op, name, " must be an int32 or int64 tensor [sequences + 1] on ",
                    packed.device(), "; got ", offsets.scalar_type(), " ", offsets.sym_sizes(),
                    " on ", offsets.device());
  TORCH_CHECK_VALUE(holds(longest.sym_ge(0)), op, longest_name, " must not be negative, got ",
                    longest);
  if (!checks_values(offsets)) return;
  TORCH_CHECK_VALUE(offsets[0].item<int64_t>() == 0, op, name, " must start at 0, got ",
                    offsets[0].item<int64_t>());
  const auto last = offsets[-1].item<int64_t>();
  TORCH_CHECK_VALUE(packed.sym_size(0) == last, op, name, " ends at ", last, ", and there are ",
                    packed.sym_size(0), " tokens");
  if (offsets.size(0) == 1) return;
  const at::Tensor lengths = offsets.diff();
  const auto least = lengths.min().item<int64_t>(), most = lengths.max().item<int64_t>();
  TORCH_CHECK_VALUE(least >= 0, op, name, " must not decrease, and does by ", -least);
  TORCH_CHECK_VALUE(longest >= most, op, longest_name, " is ", longest,
                    ", and there is a sequence of ", most, " tokens in ", name);
}

void check_scalars(std::optional<double> scale, double dropout_p, double softcap,
                   c10::IntArrayRef window_size, const OptionalTensor& rng_state,
                   const at::Tensor& query, const char* op) {
  TORCH_CHECK_VALUE(!scale || std::isfinite(static_cast<float>(*scale)), op,
                    "scale must be a finite float32, got ", scale.value_or(0.0),
                    "; None stands for 1/sqrt(head size)");
  TORCH_CHECK_VALUE(dropout_p >= 0.0 && dropout_p < 1.0, op,
                    "dropout_p must be at least 0 and less than 1, got ", dropout_p);
  TORCH_CHECK_VALUE(std::isfinite(static_cast<float>(softcap)) && softcap >= 0.0, op,
                    "softcap must be finite and positive, or 0 for none, got ", softcap);
  TORCH_CHECK_VALUE(window_size.size() == 2 && window_size[0] >= -1 && window_size[1] >= -1, op,
                    "window_size must be (left, right), each -1 for no bound or "
                    "the number of keys on that side, got ",
                    window_size);
  TORCH_CHECK_VALUE(
      !rng_state || (rng_state->scalar_type() == at::kLong && rng_state->dim() == 1 &&
                     rng_state->sym_size(0) == 2 && rng_state->device() == query.device()),
      op, "rng_state must be an int64 tensor [2], seed and offset, on ", query.device());
}

namespace {

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

// And whatever stands before it.
void check_batch(const at::Tensor& one, const at::Tensor& other, const char* name,
                 const char* other_name) {
  for (int64_t i = 4; i <= std::min(one.dim(), other.dim()); ++i) {
    const c10::SymInt size = one.sym_size(-i), other_size = other.sym_size(-i);
    TORCH_CHECK_VALUE(broadcasts(size, other_size), kOp, name, " has batch size ", size, " and ",
                      other_name, " ", other_size, "; they must be equal, or one of them 1");
  }
}

}  // namespace

void check_shapes(const Attention& args) {
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
                   "; it takes bool (True: attend), or what is added to the scores as float16, "
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

void check_seq_lens(const OptionalTensor& lengths, const at::Tensor& query,
                    const c10::SymInt& length, const char* name) {
  if (!lengths) return;
  TORCH_CHECK_VALUE(lengths->dim() == 1 && holds(lengths->sym_size(0).sym_eq(query.sym_size(0))) &&
                        lengths->device() == query.device() &&
                        (lengths->scalar_type() == at::kInt || lengths->scalar_type() == at::kLong),
                    "cudnn_ops.sdpa: ", name, " must be an int32 tensor [batch], [",
                    query.sym_size(0), "] on ", query.device(), "; got ", lengths->scalar_type(),
                    " ", lengths->sym_sizes(), " on ", lengths->device());
  if (!checks_values(*lengths) || lengths->numel() == 0) return;
  const auto least = lengths->min().item<int64_t>(), most = lengths->max().item<int64_t>();
  TORCH_CHECK_VALUE(least >= 0 && length >= most, "cudnn_ops.sdpa: ", name, " holds lengths from ",
                    least, " to ", most, "; the tensors have ", length);
}

// What is_regular asks for, also of sizes that it could not know.
void check_regular(const Attention& args) {
  const auto &query = args.query, &key = args.key, &value = args.value;
  const bool fits = query.dim() == 4 && key.dim() == 4 && value.dim() == 4 &&
                    holds(query.sym_stride(3).sym_eq(1)) && holds(key.sym_stride(3).sym_eq(1)) &&
                    holds(value.sym_stride(3).sym_eq(1)) &&
                    holds(query.sym_size(0).sym_eq(key.sym_size(0))) &&
                    holds(query.sym_size(0).sym_eq(value.sym_size(0))) &&
                    holds(key.sym_size(1).sym_eq(value.sym_size(1))) &&
                    (args.enable_gqa || holds(query.sym_size(1).sym_eq(key.sym_size(1))));
  TORCH_CHECK_VALUE(fits, kOp,
                    "the kernels take [batch, heads, length, head size] with a last stride of 1, "
                    "of one batch size; got ",
                    query.sym_sizes(), ", ", key.sym_sizes(), " and ", value.sym_sizes());
}

}  // namespace

void check_sdpa_arguments(const Attention& args) {
  const auto &query = args.query, &key = args.key;
  check_scalars(args.scale, args.dropout_p, args.softcap, args.window_size, args.rng_state, query,
                kOp);
  if (!fits_plainly(args)) {
    check_shapes(args);
    check_regular(args);
  }
  if (args.attn_mask) {
    const std::array<c10::SymInt, 4> full{query.sym_size(0), query.sym_size(1), query.sym_size(2),
                                          key.sym_size(2)};
    check_mask(*args.attn_mask, query, full);
  }
  if (args.alibi_slopes) check_per_head(*args.alibi_slopes, query, "alibi_slopes", kOp);
  if (args.sinks) check_per_head(*args.sinks, query, "sinks", kOp);
  check_seq_lens(args.seq_lens_q, query, query.sym_size(2), "seq_lens_q");
  check_seq_lens(args.seq_lens_kv, query, key.sym_size(2), "seq_lens_kv");
}

void check_sdpa(const Attention& args) {
  refuse_context_parallel(kOp);
  check_sdpa_arguments(args);
  check_supported(args.query, "query", kOp);
  check_supported(args.key, "key", kOp);
  check_supported(args.value, "value", kOp);
}

void check_sdpa_backward(const Attention& args, const AttentionGrad& grad) {
  check_sdpa(args);
  const auto& query = args.query;
  const std::array<int64_t, 4> sizes{query.size(0), query.size(1), query.size(2),
                                     args.value.size(3)};
  for (const auto& [tensor, name] :
       {std::pair{&grad.grad_out, "grad_out"}, std::pair{&grad.out, "out"}}) {
    check_same(query, *tensor, name);
    TORCH_CHECK_VALUE(tensor->sizes() == c10::IntArrayRef(sizes), "cudnn_ops.sdpa backward: ", name,
                      " must have the shape of the output, ", c10::IntArrayRef(sizes), ", got ",
                      tensor->sizes());
  }
  const auto& lse = grad.lse;
  TORCH_CHECK_VALUE(lse.sizes() == c10::IntArrayRef(sizes.data(), 3) &&
                        lse.scalar_type() == at::kFloat && lse.device() == query.device(),
                    "cudnn_ops.sdpa backward: lse must be the float32 tensor [batch, heads, "
                    "length] that sdpa_with_lse returned, got ",
                    lse.scalar_type(), " of shape ", lse.sizes(), " on ", lse.device());
  TORCH_CHECK_VALUE(args.dropout_p == 0.0 || args.rng_state,
                    "cudnn_ops.sdpa backward: dropout needs the rng_state of the forward");
}

std::array<int64_t, 4> dense_strides_like(c10::IntArrayRef sizes, const at::Tensor& like) {
  // Outermost first. A broadcast dimension (stride 0) says nothing of an order: outermost.
  const auto position = [&](int dim) {
    const int64_t stride = like.stride(dim);
    return stride == 0 ? std::numeric_limits<int64_t>::max() : stride;
  };
  std::array<int, 3> order{0, 1, 2};
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return position(a) > position(b); });
  std::array<int64_t, 4> strides{};
  strides[3] = 1;
  int64_t step = std::max<int64_t>(sizes[3], 1);
  for (int i = 2; i >= 0; --i) {
    strides[order[i]] = step;
    step *= std::max<int64_t>(sizes[order[i]], 1);
  }
  return strides;
}

const c10::TypedOperatorHandle<AttentionOp<at::Tensor>>& sdpa_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cudnn_ops::sdpa", "")
                             .typed<AttentionOp<at::Tensor>>();
  return op;
}

const c10::TypedOperatorHandle<AttentionOp<OutAndLse>>& sdpa_with_lse_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cudnn_ops::sdpa_with_lse", "")
                             .typed<AttentionOp<OutAndLse>>();
  return op;
}

const c10::TypedOperatorHandle<BackwardOp>& sdpa_backward_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cudnn_ops::_sdpa_backward", "")
                             .typed<BackwardOp>();
  return op;
}

const c10::TypedOperatorHandle<RngStateOp>& attention_rng_state_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cudnn_ops::_attention_rng_state", "")
                             .typed<RngStateOp>();
  return op;
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  // Results are laid out as their inputs are, so a compiler must hand over the very strides
  // that it traced with.
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
  const std::string arguments =
      "(Tensor query, Tensor key, Tensor value, "
      "Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, *, float? scale=None, "
      "bool enable_gqa=False, int[2] window_size=[-1, -1], bool bottom_right=False, "
      "float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, "
      "Tensor? seq_lens_q=None, Tensor? seq_lens_kv=None, bool? deterministic=None, "
      "Tensor? rng_state=None)";
  m.def(("sdpa" + arguments + " -> Tensor").c_str(), tags);
  m.def(("sdpa_with_lse" + arguments + " -> (Tensor out, Tensor lse)").c_str(), tags);
  m.def(
      "_sdpa_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
      "Tensor lse, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, "
      "float? scale=None, int[2] window_size=[-1, -1], bool bottom_right=False, "
      "float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, "
      "Tensor? seq_lens_q=None, Tensor? seq_lens_kv=None, bool? deterministic=None, "
      "Tensor? rng_state=None, bool grad_mask=False) -> "
      "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_mask, "
      "Tensor grad_sinks)",
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
        cudnn_ops::attention_kernel<cudnn_ops::OutAndLse, cudnn_ops::sdpa_with_lse_as_regular>,
        tags);
  m.def(("_sdpa_check" + arguments + " -> ()").c_str(),
        cudnn_ops::attention_kernel<void, cudnn_ops::check_sdpa>, tags);
}
