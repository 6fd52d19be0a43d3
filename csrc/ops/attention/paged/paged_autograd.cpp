// Attention over pages has no derivative: cuDNN has none. Written out, for torch's own fallback of
// that kind passes every argument through a stack, 3 us a call.

#include "ops/autograd_node.h"
#include "ops/attention/paged/paged.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

template <class Result>
using PagedOp = Result(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                       const at::Tensor&, const OptionalTensor&, c10::SymInt, std::optional<double>,
                       bool, c10::IntArrayRef, bool, double, const OptionalTensor&, bool);

template <class Result>
c10::TypedOperatorHandle<PagedOp<Result>> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<PagedOp<Result>>();
}

template <class NodePtr>
void set_node(const at::Tensor& out, const NodePtr& node) {
  torch::autograd::set_history(out, node);
}
template <class NodePtr>
void set_node(const OutAndLse& results, const NodePtr& node) {
  torch::autograd::set_history(std::get<0>(results), node);
  torch::autograd::set_history(std::get<1>(results), node);
}

template <class Result>
Result call(const c10::TypedOperatorHandle<PagedOp<Result>>& op, const char* name,
            c10::DispatchKeySet keys, const Paged& a) {
  const auto results = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return op.redispatch(below_autograd(keys), a.query, a.key_cache, a.value_cache, a.page_table,
                         a.seq_lens_kv, a.cu_seqlens_q, a.max_seqlen_q, a.scale, a.is_causal,
                         a.window_size, a.bottom_right, a.softcap, a.sinks, a.head_major);
  }();
  if (torch::autograd::compute_requires_grad(a.query, a.key_cache, a.value_cache, a.sinks)) {
    set_node(results, make_node<torch::autograd::NotImplemented>(
                          name, torch::autograd::collect_next_edges(a.query, a.key_cache,
                                                                    a.value_cache, a.sinks)));
  }
  return results;
}

at::Tensor paged_autograd(c10::DispatchKeySet keys, const Paged& args) {
  static const auto op = find_op<at::Tensor>("cudnn_ops::paged_attention");
  return call(op, "cudnn_ops::paged_attention", keys, args);
}

OutAndLse paged_with_lse_autograd(c10::DispatchKeySet keys, const Paged& args) {
  static const auto op = find_op<OutAndLse>("cudnn_ops::paged_attention_with_lse");
  return call(op, "cudnn_ops::paged_attention_with_lse", keys, args);
}

template <class Result, Result (*body)(c10::DispatchKeySet, const Paged&)>
Result autograd_kernel(c10::DispatchKeySet keys, const at::Tensor& query,
                       const at::Tensor& key_cache, const at::Tensor& value_cache,
                       const at::Tensor& page_table, const at::Tensor& seq_lens_kv,
                       const OptionalTensor& cu_seqlens_q, c10::SymInt max_seqlen_q,
                       std::optional<double> scale, bool is_causal, c10::IntArrayRef window_size,
                       bool bottom_right, double softcap, const OptionalTensor& sinks,
                       bool head_major) {
  return body(keys, {query, key_cache, value_cache, page_table, seq_lens_kv, cu_seqlens_q,
                     std::move(max_seqlen_q), scale, is_causal, window_size, bottom_right, softcap,
                     sinks, head_major});
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  using namespace cudnn_ops;
  m.impl("paged_attention", autograd_kernel<at::Tensor, paged_autograd>);
  m.impl("paged_attention_with_lse", autograd_kernel<OutAndLse, paged_with_lse_autograd>);
}
