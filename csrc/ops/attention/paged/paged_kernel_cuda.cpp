#include "ops/attention/paged/paged_kernel_cuda.h"

#include "ops/attention/band.h"
#include "ops/attention/plan_tensors_cuda.h"

#include "graph/cuda_call.h"
#include "kernels/paged_decode.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <cmath>

namespace cudnn_ops {
namespace {

constexpr const char* kOp = "cudnn_ops.paged_attention: ";

PagedQueries queries_of(const Paged& args) {
  const Band band = Band::of(args);
  const int64_t queries = args.is_packed() ? args.max_seqlen_q.expect_int() : args.query.size(1);
  const int64_t group = args.query.size(-2) / args.key_cache.size(args.head_dim());
  return {args.seq_lens_kv, args.cu_seqlens_q, queries,          group,
          band.left,        band.right,        band.bottom_right};
}

at::Tensor paged_plan_cuda(const PagedPlan& args) {
  check_paged_plan(args);
  const c10::cuda::CUDAGuard device_guard(args.seq_lens_kv.device());
  graph::require_sm80("cudnn_ops.paged_plan", args.seq_lens_kv.get_device());
  const Band band = Band::of(args);
  return make_paged_plan({args.seq_lens_kv, args.cu_seqlens_q, args.queries.expect_int(),
                          args.group.expect_int(), band.left, band.right, band.bottom_right});
}

}  // namespace

void decode_by_kernel(const Paged& args, const at::Tensor& out, const at::Tensor& lse) {
  const auto &query = args.query, &value_cache = args.value_cache;
  TORCH_CHECK_NOT_IMPLEMENTED(
      has_paged_decode(query.scalar_type(), args.key_cache.scalar_type(), query.size(-1),
                       value_cache.size(-1)),
      kOp,
      "cuDNN does not decode caches of float8_e4m3fn, and the kernel for them supports head sizes "
      "64 and 128, equal for keys and values; got ",
      query.size(-1), " and ", value_cache.size(-1), ": keep such caches in bfloat16");
  // Tokens behind the last offset belong to no sequence.
  if (args.is_packed()) fill_with_nothing(out, lse, args.sinks);
  const double scale = args.scale.value_or(1 / std::sqrt(static_cast<double>(query.size(-1))));
  decode_pages(
      queries_of(args),
      {query, args.key_cache, value_cache, args.page_table, args.descale_k, args.descale_v,
       args.sinks, args.head_major, static_cast<float>(scale), static_cast<float>(args.softcap)},
      args.plan, out, lse);
}

}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_paged_plan", cudnn_ops::kernel<cudnn_ops::paged_plan_cuda>);
}
