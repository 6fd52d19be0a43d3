// Attention over a paged cache on CUDA. The host reads neither lengths nor pages: what varies from
// call to call lies on the device, and the plan is declared for a rounded-up batch and table.

#include "paged_problem.h"
#include "sdpa_cuda.h"
#include "varlen_table.h"

#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <tuple>

namespace cudnn_ops {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor make_query_lengths(const at::Device& device, int64_t batch, int64_t declared,
                              int64_t length) {
  const at::Tensor lengths =
      at::full({declared}, length, at::TensorOptions().dtype(at::kInt).device(device));
  if (batch < declared) lengths.narrow(0, batch, declared - batch).zero_();
  return lengths;
}

// How many queries each sequence of a batch has, and none beyond it: the same for all calls of a
// shape, so it is made once. Any stream may read it, for the first waited until it was written.
at::Tensor query_lengths(const at::Device& device, int64_t batch, int64_t declared,
                         int64_t length) {
  using Key = std::tuple<c10::DeviceIndex, int64_t, int64_t, int64_t>;
  static auto& made = *new std::map<Key, at::Tensor>;  // the driver may be gone at exit
  static std::mutex mutex;
  const Key key{device.index(), batch, declared, length};
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = made.find(key); found != made.end()) return found->second;
  const at::Tensor lengths = make_query_lengths(device, batch, declared, length);
  if (graph::is_capturing()) return lengths;  // written when the graph is replayed
  c10::cuda::getCurrentCUDAStream().synchronize();
  return made.emplace(key, lengths).first->second;
}

// The tensor itself if it is as large as is declared, else a copy with zeros behind it.
at::Tensor padded(const at::Tensor& tensor, at::IntArrayRef declared) {
  if (tensor.sizes() == declared && tensor.is_contiguous()) return tensor;
  const at::Tensor copy = at::zeros(declared, tensor.options());
  at::Tensor own = copy.narrow(0, 0, tensor.size(0));
  if (tensor.dim() > 1) own = own.narrow(1, 0, tensor.size(1));
  own.copy_(tensor);
  return copy;
}

// [B, H, Sq], or [H, tokens] with room for what the plan declares.
at::Tensor empty_lse(const Paged& args) {
  const auto& query = args.query;
  const auto empty = [&](at::IntArrayRef sizes) -> at::Tensor {
    return at::detail::empty_cuda(sizes, at::kFloat, query.device(), std::nullopt);
  };
  if (!args.is_packed()) return empty({query.size(0), query.size(2), query.size(1)});
  const int64_t tokens = query.size(0);
  return empty({query.size(1), packed_lse_stride(tokens)}).narrow(1, 0, tokens);
}

// The sinks beside a log-sum-exp.
at::Tensor sinks_of(const Paged& args) {
  const at::Tensor sinks = args.sinks->to(at::kFloat);
  return args.is_packed() ? sinks.unsqueeze(-1) : sinks.view({1, -1, 1});
}

// With the sink's share taken out of what was computed without it.
void apply_sinks(const Paged& args, const at::Tensor& out, const at::Tensor& lse) {
  const at::Tensor sinks = sinks_of(args);
  const at::Tensor share = lse.sub(sinks).sigmoid_();
  out.mul_(share.transpose(-1, -2).unsqueeze(-1));
  at::Tensor result = lse;
  at::logaddexp_out(result, lse, sinks);
}

graph::Call call_of(const SdpaPointers& pointers) {
  return {"cudnn_ops.paged_attention",
          "gather the pages and call cudnn_ops.scaled_dot_product_attention", pointers.all,
          pointers.written};
}

void run(const Paged& args, const at::Tensor& out, at::Tensor lse) {
  const PagedProblem problem(args, lse.defined());
  const auto& params = problem.params;
  const auto& sizes = params.page_table.sizes;
  if (params.with_lse && !lse.defined()) lse = empty_lse(args);
  // cuDNN leaves alone what belongs to a sequence without keys.
  out.zero_();
  if (lse.defined()) lse.fill_(-kInfinity);
  if (lse.defined() && params.mask.has_sinks) lse.copy_(sinks_of(args));

  const Scale scale(args.scale, args.query);
  SdpaForwardTensors tensors{scale.applied_to(args.query),
                             args.key_cache,
                             args.value_cache,
                             MaskTensors(),
                             scale.value,
                             static_cast<float>(args.softcap),
                             out,
                             lse};
  if (params.mask.has_sinks) tensors.mask.sinks = args.sinks->to(at::kFloat).contiguous();
  tensors.mask.lengths_kv = padded(args.seq_lens_kv, {sizes[0]});
  const at::Tensor table = padded(args.page_table, {sizes[0], sizes[2]});
  const OptionalTensor all;
  std::optional<SequenceTable> queries;
  if (args.is_packed()) {
    queries.emplace(*args.cu_seqlens_q, all, sizes[0]);
  } else {
    tensors.mask.lengths =
        query_lengths(args.query.device(), args.query.size(0), sizes[0], args.query.size(1));
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
  if (problem.has_sinks_afterwards) apply_sinks(args, out, lse);
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
  run({query, args.key_cache, args.value_cache, args.page_table, args.seq_lens_kv,
       args.cu_seqlens_q, args.max_seqlen_q, args.scale, args.is_causal, args.window_size,
       args.softcap, args.sinks, args.head_major},
      out, lse);
}

at::Tensor empty_out(const Paged& args) {
  auto sizes = args.query.sizes().vec();
  sizes.back() = args.value_cache.size(3);
  return at::detail::empty_cuda(sizes, args.query.scalar_type(), args.query.device(), std::nullopt);
}

at::Tensor paged_cuda(const Paged& args) {
  check_paged(args);
  const at::Tensor out = empty_out(args);
  forward_into(args, out, at::Tensor());
  return out;
}

OutAndLse paged_with_lse_cuda(const Paged& args) {
  check_paged(args);
  const at::Tensor out = empty_out(args), lse = empty_lse(args);
  forward_into(args, out, lse);
  return {out, lse.contiguous()};
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
  if (graph::is_addressable(out)) return forward_into(args, out, at::Tensor());
  const at::Tensor aligned = empty_out(args);
  forward_into(args, aligned, at::Tensor());
  out.copy_(aligned);
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  using namespace cudnn_ops;
  m.impl("paged_attention", paged_kernel<at::Tensor, paged_cuda>);
  m.impl("paged_attention_with_lse", paged_kernel<OutAndLse, paged_with_lse_cuda>);
  m.impl("_paged_attention_out", paged_out_cuda);
}
