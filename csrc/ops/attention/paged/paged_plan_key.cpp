// "Which plan would this call need?", from the sizes, strides and dtypes of its tensors alone.

#include "ops/attention/paged/paged_problem.h"

#include <torch/library.h>

namespace cudnn_ops {
namespace {

std::vector<int64_t> plan_key(const Paged& args, bool with_lse) {
  check_paged(args);
  TORCH_CHECK_VALUE(
      args.query.numel() > 0 && args.key_cache.numel() > 0,
      "cudnn_ops.paged_attention: without queries or keys there is no plan; query is ",
      args.query.sizes(), " and key_cache ", args.key_cache.sizes());
  if (is_packed_batch(args)) return plan_key(PackedBatch(args).args, with_lse);
  return graph::PlanKey::of(PagedProblem(args, with_lse).params, 0).words().vec();
}

std::vector<int64_t> plan_key_op(const at::Tensor& query, const at::Tensor& key_cache,
                                 const at::Tensor& value_cache, const at::Tensor& page_table,
                                 const at::Tensor& seq_lens_kv, const OptionalTensor& cu_seqlens_q,
                                 int64_t max_seqlen_q, bool is_causal, c10::IntArrayRef window_size,
                                 bool bottom_right, double softcap, const OptionalTensor& sinks,
                                 bool head_major, bool with_lse) {
  return plan_key(
      {query, key_cache, value_cache, page_table, seq_lens_kv, cu_seqlens_q, max_seqlen_q,
       std::nullopt, is_causal, window_size, bottom_right, softcap, sinks, head_major},
      with_lse);
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  m.def(
      "_paged_plan_key(Tensor query, Tensor key_cache, Tensor value_cache, Tensor page_table, "
      "Tensor seq_lens_kv, *, Tensor? cu_seqlens_q=None, int max_seqlen_q=0, "
      "bool is_causal=False, int[2] window_size=[-1, -1], bool bottom_right=True, "
      "float softcap=0.0, Tensor? sinks=None, bool head_major=False, bool with_lse=False) -> int[]",
      cudnn_ops::plan_key_op);
}
