// Scaled dot-product attention: schemas, the checks of its arguments, the layout of its
// results. Kernels: sdpa_cuda.cpp here, the CPU and fake ones in cudnn_ops/ops/sdpa.py.

#include "sdpa.h"

#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace cudnn_ops {
namespace {

// Adds no guard for sizes that a compiler keeps symbolic beyond the fact that is checked.
bool holds(const c10::SymBool& condition) {
  return condition.expect_true(__FILE__, __LINE__);
}

bool is_attention_dtype(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  if (dtype == at::kHalf || dtype == at::kBFloat16) return true;
  return !tensor.is_cuda() && (dtype == at::kFloat || dtype == at::kDouble);
}

void check_layout(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_TYPE(tensor.defined(), "cudnn_ops.sdpa: ", name, " must be a tensor, got None");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "cudnn_ops.sdpa: ", name,
                    " must be a dense (strided) tensor, got layout ", tensor.layout(),
                    "; call .to_dense() first");
  TORCH_CHECK_VALUE(tensor.dim() == 4, "cudnn_ops.sdpa: ", name,
                    " must have 4 dimensions [batch, heads, length, head size], got shape ",
                    tensor.sym_sizes(), "; add the missing ones with unsqueeze");
  TORCH_CHECK_VALUE(holds(tensor.sym_stride(3).sym_eq(1)), "cudnn_ops.sdpa: ", name,
                    " must have a last stride of 1, got strides ", tensor.sym_strides(),
                    "; call .contiguous() first");
}

// What no GPU takes, said before a graph is built.
void check_supported(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_TYPE(is_attention_dtype(tensor), "cudnn_ops.sdpa: ", name, " has dtype ",
                   tensor.scalar_type(),
                   "; on a GPU it takes float16 and bfloat16 (use torch.autocast or "
                   ".bfloat16()), on a CPU float32 and float64 too");
  const auto head_size = tensor.sym_size(3);
  TORCH_CHECK_VALUE(holds((head_size % 8).sym_eq(0)) && holds(head_size.sym_ge(8)),
                    "cudnn_ops.sdpa: the head size of ", name, " is ", head_size,
                    "; cuDNN takes multiples of 8 from 8 on: pad the last dimension with zeros");
}

void check_same(const at::Tensor& query, const at::Tensor& other, const char* name) {
  TORCH_CHECK_VALUE(query.device() == other.device(), "cudnn_ops.sdpa: query is on ",
                    query.device(), " and ", name, " on ", other.device(),
                    "; move them to one device");
  TORCH_CHECK_TYPE(query.scalar_type() == other.scalar_type(), "cudnn_ops.sdpa: query has dtype ",
                   query.scalar_type(), " and ", name, " ", other.scalar_type(),
                   "; cast them to one dtype");
  TORCH_CHECK_VALUE(holds(query.sym_size(0).sym_eq(other.sym_size(0))),
                    "cudnn_ops.sdpa: query has batch size ", query.sym_size(0), " and ", name, " ",
                    other.sym_size(0), "; expand the smaller one");
}

void check_op(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
              const std::optional<at::Tensor>& attn_mask, double dropout_p,
              std::optional<double> scale, bool enable_gqa) {
  check_sdpa(query, key, value, attn_mask, dropout_p, scale, enable_gqa);
}

}  // namespace

void check_sdpa_shapes(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                       bool enable_gqa) {
  check_layout(query, "query");
  check_layout(key, "key");
  check_layout(value, "value");
  check_same(query, key, "key");
  check_same(query, value, "value");
  TORCH_CHECK_VALUE(holds(query.sym_size(3).sym_eq(key.sym_size(3))),
                    "cudnn_ops.sdpa: query has head size ", query.sym_size(3), " and key ",
                    key.sym_size(3), "; they must be equal (the value's may differ)");
  TORCH_CHECK_VALUE(holds(key.sym_size(2).sym_eq(value.sym_size(2))),
                    "cudnn_ops.sdpa: key has length ", key.sym_size(2), " and value ",
                    value.sym_size(2), "; they must be equal");
  const auto heads = query.sym_size(1);
  const auto heads_kv = key.sym_size(1);
  TORCH_CHECK_VALUE(holds(heads_kv.sym_eq(value.sym_size(1))), "cudnn_ops.sdpa: key has ", heads_kv,
                    " heads and value ", value.sym_size(1), "; they must be equal");
  if (enable_gqa) {
    TORCH_CHECK_VALUE(holds(heads_kv.sym_ge(1)) && holds((heads % heads_kv).sym_eq(0)),
                      "cudnn_ops.sdpa: query has ", heads, " heads and key ", heads_kv,
                      "; with enable_gqa=True the first must be a multiple of the second");
  } else {
    TORCH_CHECK_VALUE(holds(heads.sym_eq(heads_kv)), "cudnn_ops.sdpa: query has ", heads,
                      " heads and key ", heads_kv,
                      "; pass enable_gqa=True for grouped-query attention");
  }
}

void check_sdpa(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                const std::optional<at::Tensor>& attn_mask, double dropout_p,
                std::optional<double> scale, bool enable_gqa) {
  TORCH_CHECK_NOT_IMPLEMENTED(!attn_mask.has_value(),
                              "cudnn_ops.sdpa: attn_mask is not supported; pass attn_mask=None "
                              "with is_causal=True for a causal mask, or use "
                              "torch.nn.functional.scaled_dot_product_attention");
  TORCH_CHECK_NOT_IMPLEMENTED(dropout_p == 0.0, "cudnn_ops.sdpa: dropout_p must be 0.0, got ",
                              dropout_p, "; dropout inside attention is not supported");
  TORCH_CHECK_VALUE(!scale.has_value() || std::isfinite(static_cast<float>(*scale)),
                    "cudnn_ops.sdpa: scale must be a finite float32, got ", scale.value_or(0.0),
                    "; None stands for 1/sqrt(head size)");
  check_sdpa_shapes(query, key, value, enable_gqa);
  check_supported(query, "query");
  check_supported(key, "key");
  check_supported(value, "value");
}

void check_sdpa_backward(const at::Tensor& grad_out, const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse) {
  check_sdpa(query, key, value, std::nullopt, 0.0, std::nullopt, /*enable_gqa=*/true);
  const std::array<int64_t, 4> sizes{query.size(0), query.size(1), query.size(2), value.size(3)};
  for (const auto& [tensor, name] : {std::pair{&grad_out, "grad_out"}, std::pair{&out, "out"}}) {
    check_same(query, *tensor, name);
    TORCH_CHECK_VALUE(tensor->sizes() == c10::IntArrayRef(sizes), "cudnn_ops.sdpa backward: ", name,
                      " must have the shape of the output, ", c10::IntArrayRef(sizes), ", got ",
                      tensor->sizes());
  }
  TORCH_CHECK_VALUE(lse.sizes() == c10::IntArrayRef(sizes.data(), 3) &&
                        lse.scalar_type() == at::kFloat && lse.device() == query.device(),
                    "cudnn_ops.sdpa backward: lse must be the float32 tensor [batch, heads, "
                    "length] that sdpa_with_lse returned, got ",
                    lse.scalar_type(), " of shape ", lse.sizes(), " on ", lse.device());
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

const c10::TypedOperatorHandle<Sdpa>& sdpa_op() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("cudnn_ops::sdpa", "").typed<Sdpa>();
  return op;
}

const c10::TypedOperatorHandle<SdpaWithLse>& sdpa_with_lse_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cudnn_ops::sdpa_with_lse", "")
                             .typed<SdpaWithLse>();
  return op;
}

const c10::TypedOperatorHandle<SdpaBackward>& sdpa_backward_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cudnn_ops::_sdpa_backward", "")
                             .typed<SdpaBackward>();
  return op;
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  // Results are laid out as their inputs are, so a compiler must hand over the very strides
  // that it traced with.
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
  m.def(
      "sdpa(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
      "bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> Tensor",
      tags);
  m.def(
      "sdpa_with_lse(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
      "float dropout_p=0.0, bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> "
      "(Tensor out, Tensor lse)",
      tags);
  m.def(
      "_sdpa_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
      "Tensor lse, bool is_causal, float? scale) -> "
      "(Tensor grad_query, Tensor grad_key, Tensor grad_value)",
      tags);
  // The checks alone, for the kernels that are written in Python.
  m.def(
      "_sdpa_check(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, "
      "float? scale, bool enable_gqa) -> ()",
      cudnn_ops::check_op, tags);
}
