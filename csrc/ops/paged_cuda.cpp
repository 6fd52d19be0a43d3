// Attention over a paged cache on CUDA. The host reads neither lengths nor pages: what varies from
// call to call lies on the device, and the plan is declared for a rounded-up batch and table.

#include "paged_problem.h"
#include "sdpa_cuda.h"
#include "sdpa_ragged.h"
#include "varlen_table.h"

#include "../kernels/paged_merge.h"
#include "../kernels/paged_pad.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/full.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <tuple>

namespace cudnn_ops {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// How many queries each sequence of a full batch has: the same for all calls of a shape, so it is
// made once. Any stream may read it, for the first waited until it was written.
at::Tensor query_lengths(const at::Device& device, int64_t batch, int64_t length) {
  using Key = std::tuple<c10::DeviceIndex, int64_t, int64_t>;
  static auto& made = *new std::map<Key, at::Tensor>;  // the driver may be gone at exit
  static std::mutex mutex;
  const Key key{device.index(), batch, length};
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = made.find(key); found != made.end()) return found->second;
  const at::Tensor lengths =
      at::full({batch}, length, at::TensorOptions().dtype(at::kInt).device(device));
  if (graph::is_capturing()) return lengths;  // written when the graph is replayed
  c10::cuda::getCurrentCUDAStream().synchronize();
  return made.emplace(key, lengths).first->second;
}

// How many sequences cuDNN writes: those that are declared, whether they are there or not. Packed
// ones it leaves alone.
int64_t rows_of(const Paged& args) {
  return args.is_packed() ? args.query.size(0) : declared_batch(args.query.size(0));
}

// The queries as the plan declares them; what has to be added is read and does not count.
at::Tensor declared_query(const at::Tensor& query, const PagedProblem& problem, int64_t rows) {
  if (problem.queries == 1 && query.size(0) == rows) return query;
  const int64_t heads_kv = problem.params.key_cache.sizes[1];
  at::Tensor given = query;
  if (problem.queries > 1) given = query.unflatten(2, {heads_kv, -1}).transpose(1, 2);
  auto sizes = given.sizes().vec();
  sizes[0] = rows;
  const at::Tensor copy =
      at::detail::empty_cuda(sizes, query.scalar_type(), query.device(), std::nullopt);
  copy.narrow(0, 0, query.size(0)).copy_(given);
  return copy;
}

at::Tensor empty_out(const Paged& args, int64_t rows) {
  auto sizes = args.query.sizes().vec();
  sizes[0] = rows;
  sizes.back() = args.value_cache.size(3);
  return at::detail::empty_cuda(sizes, args.query.scalar_type(), args.query.device(), std::nullopt);
}

// [rows, H, Sq], or [H, tokens] with room for what the plan declares.
at::Tensor empty_lse(const Paged& args, int64_t rows) {
  const auto& query = args.query;
  const auto empty = [&](at::IntArrayRef sizes) -> at::Tensor {
    return at::detail::empty_cuda(sizes, at::kFloat, query.device(), std::nullopt);
  };
  if (!args.is_packed()) return empty({rows, query.size(2), query.size(1)});
  return empty({query.size(1), packed_lse_stride(rows)}).narrow(1, 0, rows);
}

// The sinks beside a log-sum-exp.
at::Tensor sinks_of(const Paged& args) {
  const at::Tensor sinks = args.sinks->to(at::kFloat);
  return args.is_packed() ? sinks.unsqueeze(-1) : sinks.view({1, -1, 1});
}

graph::Call call_of(const SdpaPointers& pointers) {
  return {"cudnn_ops.paged_attention",
          "gather the pages and call cudnn_ops.scaled_dot_product_attention", pointers.all,
          pointers.written};
}

// Where the plan writes: `out` and `lse` themselves, but for queries that it takes for heads.
PartialAttention partial_of(const Paged& args, const PagedProblem& problem, const at::Tensor& out,
                            const at::Tensor& lse) {
  const int64_t rows = rows_of(args);
  const auto empty = [&](at::IntArrayRef sizes, at::ScalarType dtype) -> at::Tensor {
    return at::detail::empty_cuda(sizes, dtype, out.device(), std::nullopt);
  };
  PartialAttention partial{out, lse, problem.hidden};
  if (problem.queries > 1) {
    const int64_t heads = args.query.size(2) * problem.queries;
    partial.out = empty({rows, heads, out.size(-1)}, out.scalar_type());
    partial.lse = empty({rows, heads}, at::kFloat);
  } else if (problem.params.with_lse && !lse.defined()) {
    partial.lse = empty_lse(args, rows);
  }
  return partial;
}

// `out` and `lse` have rows_of() rows.
void run(const Paged& args, const at::Tensor& out, const at::Tensor& lse) {
  const PagedProblem problem(args, lse.defined());
  const auto& params = problem.params;
  const int64_t declared = params.page_table.sizes[0], width = params.page_table.sizes[2];
  const PartialAttention partial = partial_of(args, problem, out, lse);
  constexpr int kMeasured = 9;  // Hopper
  if (!problem.is_decoding() || at::cuda::getCurrentDeviceProperties()->major != kMeasured) {
    // Not every engine writes what belongs to a sequence without keys.
    partial.out.zero_();
    if (partial.lse.defined()) partial.lse.fill_(-kInfinity);
    if (partial.lse.defined() && params.mask.has_sinks) partial.lse.copy_(sinks_of(args));
  }

  const Scale scale(args.scale, args.query);
  const at::Tensor query = scale.applied_to(args.query);
  SdpaForwardTensors tensors{declared_query(query, problem, rows_of(args)),
                             args.key_cache,
                             args.value_cache,
                             MaskTensors(),
                             scale.value,
                             static_cast<float>(args.softcap),
                             partial.out,
                             partial.lse};
  if (params.mask.has_sinks) tensors.mask.sinks = args.sinks->to(at::kFloat).contiguous();
  const OptionalTensor all;
  std::optional<SequenceTable> queries;
  if (args.is_packed()) queries.emplace(*args.cu_seqlens_q, all, declared);
  const int64_t length = params.query.sizes[2];
  at::Tensor table = args.page_table;
  if (problem.is_decoding() && problem.hidden == 0 && table.size(0) == declared &&
      table.size(1) == width && table.is_contiguous() && args.seq_lens_kv.is_contiguous()) {
    tensors.mask.lengths_kv = args.seq_lens_kv;
    tensors.mask.lengths = query_lengths(table.device(), declared, length);
  } else {
    const auto padded =
        pad_table(table, args.seq_lens_kv,
                  {declared, width, args.key_cache.size(args.token_dim()), length, problem.hidden});
    table = padded.page_table;
    tensors.mask.lengths_kv = padded.seq_lens_kv;
    if (!queries) tensors.mask.lengths = padded.seq_lens_q;
  }
  SdpaPointers pointers(params, tensors);
  if (queries) {
    const size_t of_query = queries->add_offsets(tensors.query);
    const size_t of_out = queries->add_offsets(out);
    const size_t of_lse = params.with_lse ? queries->add_offsets(1) : 0;
    queries->make();
    pointers.all.push_back(queries->offsets(of_query));
    pointers.all.push_back(queries->offsets(of_out));
    if (params.with_lse) pointers.all.push_back(queries->offsets(of_lse));
    pointers.all.push_back(queries->lengths());
    pointers.all.push_back(tensors.mask.lengths_kv.mutable_data_ptr());
  }
  pointers.all.push_back(table.mutable_data_ptr());
  const graph::Call call = call_of(pointers);
  graph::execute(call, *graph::get_plan(call, graph::PlanKey::of(params, out.get_device())));
  if (problem.is_merged) merge_paged(args, query, scale.value, partial, out, lse);
}

void check_addressable(const at::Tensor& cache, const char* name) {
  TORCH_CHECK_VALUE(graph::is_addressable(cache), "cudnn_ops.paged_attention: ", name,
                    " must lie at a multiple of 16 bytes, and so must each head, token and page; "
                    "got strides ",
                    cache.strides());
}

void forward_into(const Paged& args, const at::Tensor& out, const at::Tensor& lse) {
  const c10::cuda::CUDAGuard device_guard(args.query.device());
  graph::require_sm80("cudnn_ops.paged_attention", args.query.get_device());
  if (out.numel() == 0) return;
  if (args.key_cache.numel() == 0 || args.page_table.numel() == 0) {
    out.zero_();
    if (lse.defined()) args.sinks ? lse.copy_(sinks_of(args)) : lse.fill_(-kInfinity);
    return;
  }
  check_addressable(args.key_cache, "key_cache");
  check_addressable(args.value_cache, "value_cache");
  if (graph::is_addressable(args.query)) return run(args, out, lse);
  const at::Tensor query = args.query.contiguous();
  run(args.with_query(query, args.cu_seqlens_q), out, lse);
}

// The output, and with_lse the log-sum-exp.
OutAndLse forward(const Paged& args, bool with_lse) {
  if (is_packed_batch(args)) {
    auto [out, lse] = forward(PackedBatch(args).args, with_lse);
    return {out.squeeze(1), with_lse ? lse.squeeze(2).t().contiguous() : lse};
  }
  const int64_t rows = rows_of(args);
  const at::Tensor out = empty_out(args, rows);
  const at::Tensor lse = with_lse ? empty_lse(args, rows) : at::Tensor();
  forward_into(args, out, lse);
  const int64_t own = args.query.size(0);
  if (args.is_packed()) return {out, with_lse ? lse.contiguous() : lse};
  if (own == rows) return {out, lse};
  return {out.narrow(0, 0, own), with_lse ? lse.narrow(0, 0, own) : lse};
}

at::Tensor paged_cuda(const Paged& args) {
  check_paged(args);
  return std::get<0>(forward(args, /*with_lse=*/false));
}

OutAndLse paged_with_lse_cuda(const Paged& args) {
  check_paged(args);
  return forward(args, /*with_lse=*/true);
}

void write_out(const Paged& args, const at::Tensor& out) {
  if (is_packed_batch(args)) return write_out(PackedBatch(args).args, out.unsqueeze(1));
  const bool has_room = out.size(0) == rows_of(args) && graph::is_addressable(out);
  if (has_room) return forward_into(args, out, at::Tensor());
  out.copy_(std::get<0>(forward(args, /*with_lse=*/false)));
}

void paged_out_cuda(const at::Tensor& query, const at::Tensor& key_cache,
                    const at::Tensor& value_cache, const at::Tensor& page_table,
                    const at::Tensor& seq_lens_kv, const OptionalTensor& cu_seqlens_q,
                    c10::SymInt max_seqlen_q, std::optional<double> scale, bool is_causal,
                    c10::IntArrayRef window_size, double softcap, const OptionalTensor& sinks,
                    bool head_major, const at::Tensor& out) {
  const Paged args{
      query, key_cache, value_cache, page_table, seq_lens_kv, cu_seqlens_q, std::move(max_seqlen_q),
      scale, is_causal, window_size, softcap,    sinks,       head_major};
  check_paged(args);
  check_paged_out(args, out);
  write_out(args, out);
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  using namespace cudnn_ops;
  m.impl("paged_attention", paged_kernel<at::Tensor, paged_cuda>);
  m.impl("paged_attention_with_lse", paged_kernel<OutAndLse, paged_with_lse_cuda>);
  m.impl("_paged_attention_out", paged_out_cuda);
}
