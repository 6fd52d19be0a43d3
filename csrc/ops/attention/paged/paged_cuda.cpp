// Attention over a paged cache on CUDA. The host reads neither lengths nor pages: what varies from
// call to call lies on the device, and the plan is declared for a rounded-up batch and table.

#include "ops/attention/paged/paged_choice.h"
#include "ops/attention/paged/paged_kernel_cuda.h"
#include "ops/attention/paged/paged_problem.h"
#include "ops/attention/plan_tensors_cuda.h"
#include "ops/attention/polymorphic.h"
#include "ops/attention/packed/varlen_table.h"

#include "kernels/paged_merge.h"
#include "kernels/paged_pad.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/ones.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

namespace cudnn_ops {
namespace {

// The most sequences of one plan: a number that declared_batch() leaves as it is, and a multiple of
// 4, so that what lies behind so many begins where cuDNN can read it.
constexpr int64_t kMaxSequences = 49152;

// int32 ones, how many queries each sequence has in decoding: the same for all calls of a batch, so
// they are made once. No stream waits for them on the host: until they are known to be written,
// those that did not write them wait on the device.
class Ones {
 public:
  explicit Ones(const at::Tensor& ones) : tensor_(ones) {
    written_.record();
  }

  // For the current stream; not defined where only a wait on the host would make them safe.
  at::Tensor get() {
    if (!is_written_) {
      const bool capturing = graph::is_capturing();
      {
        // Another thread may be capturing a graph, which a query would break.
        const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
        is_written_ = written_.query();
      }
      if (!is_written_ && capturing) return {};
      if (!is_written_) written_.block(c10::cuda::getCurrentCUDAStream());
    }
    return tensor_;
  }

 private:
  at::Tensor tensor_;
  at::cuda::CUDAEvent written_;
  bool is_written_ = false;
};

at::Tensor single_queries(const at::Device& device, int64_t batch) {
  using Key = std::pair<c10::DeviceIndex, int64_t>;
  static auto& made = *new std::map<Key, Ones>;  // the driver may be gone at exit
  static std::mutex mutex;
  const Key key{device.index(), batch};
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto found = made.find(key); found != made.end()) {
      if (const at::Tensor ones = found->second.get(); ones.defined()) return ones;
    }
  }
  const at::Tensor ones = at::ones({batch}, at::TensorOptions().dtype(at::kInt).device(device));
  if (graph::is_capturing()) return ones;  // written when the graph is replayed
  const std::lock_guard<std::mutex> lock(mutex);
  made.try_emplace(key, ones);
  return ones;
}

// How many sequences cuDNN writes: those that are declared, whether they are there or not. Packed
// ones it leaves alone.
int64_t rows_of(const Paged& args) {
  if (args.is_packed()) return args.query.size(0);
  const int64_t batch = args.query.size(0);
  const int64_t before_last = std::max<int64_t>(batch - 1, 0) / kMaxSequences * kMaxSequences;
  return before_last + declared_batch(batch - before_last);
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

constexpr CallName kCall{"cudnn_ops.paged_attention",
                         "gather the pages and call cudnn_ops.scaled_dot_product_attention"};

// Where the plan writes: `out` and `lse` themselves, except where queries are folded into heads.
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
  const bool writes_all =
      problem.is_decoding() && at::cuda::getCurrentDeviceProperties()->major == kMeasured;
  if (!args.is_packed() && !writes_all) {
    // Not every engine writes what belongs to a sequence without keys.
    fill_with_nothing(partial.out, partial.lse, params.mask.has_sinks ? args.sinks : std::nullopt);
  }

  const Scale scale(args.scale, args.query);
  const at::Tensor query = scale.applied_to(args.query);
  SdpaForwardTensors tensors{declared_query(query, problem, rows_of(args)),
                             args.key_cache,
                             args.value_cache,
                             MaskTensors::of(args, query, 0, 0, params.mask.has_sinks),
                             scale.value,
                             static_cast<float>(args.softcap),
                             partial.out,
                             partial.lse};
  const OptionalTensor all;
  std::optional<SequenceTable> queries;
  if (args.is_packed()) queries.emplace(*args.cu_seqlens_q, all, declared);
  const int64_t length = params.query.sizes[2];
  at::Tensor table = args.page_table;
  const bool is_told_all = problem.hidden == 0 && problem.most_keys == kUnbounded;
  if (problem.is_decoding() && is_told_all && table.size(0) == declared && table.size(1) == width &&
      graph::is_addressable(table, graph::Strides::kDense) &&
      graph::is_addressable(args.seq_lens_kv, graph::Strides::kDense)) {
    tensors.mask.lengths_kv = args.seq_lens_kv;
    tensors.mask.lengths = single_queries(table.device(), declared);
  } else {
    const auto padded = pad_table(table, args.seq_lens_kv,
                                  {declared, width, args.key_cache.size(args.token_dim()), length,
                                   problem.hidden, problem.most_keys});
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
  const graph::Call call = call_of(kCall, pointers);
  graph::execute(call, *graph::get_plan(call, graph::PlanKey::of(params, out.get_device())));
  if (problem.is_merged) {
    merge_paged({query, args.key_cache, args.value_cache, args.page_table, args.seq_lens_kv,
                 args.sinks, args.head_major, scale.value, static_cast<float>(args.softcap)},
                partial, out, lse);
  }
}

void check_addressable(const at::Tensor& cache, const char* name) {
  TORCH_CHECK_VALUE(graph::is_addressable(cache), "cudnn_ops.paged_attention: ", name,
                    " must lie at a multiple of 16 bytes, and so must each head, token and page; "
                    "got strides ",
                    cache.strides());
}

// Some of the sequences, from number `start` on. Packed queries stay whole: the offsets alone say
// which of them belong to these.
void run_part(const Paged& args, int64_t start, int64_t count, const at::Tensor& out,
              const at::Tensor& lse) {
  Paged part = args;
  part.page_table = args.page_table.narrow(0, start, count);
  part.seq_lens_kv = args.seq_lens_kv.narrow(0, start, count);
  if (args.is_packed()) {
    part.cu_seqlens_q = args.cu_seqlens_q->narrow(0, start, count + 1);
  } else {
    part.query = args.query.narrow(0, start, count);
  }
  const auto mine = [&](const at::Tensor& tensor) {
    return args.is_packed() || !tensor.defined() ? tensor : tensor.narrow(0, start, rows_of(part));
  };
  run(part, mine(out), mine(lse));
}

void run_in_parts(const Paged& args, const at::Tensor& out, const at::Tensor& lse) {
  if (args.is_packed()) {
    // Not every engine writes what belongs to a sequence without keys.
    fill_with_nothing(out, lse, args.sinks);
  }
  const int64_t sequences = args.page_table.size(0);
  if (sequences <= kMaxSequences) return run(args, out, lse);
  for (int64_t start = 0; start < sequences; start += kMaxSequences) {
    run_part(args, start, std::min(kMaxSequences, sequences - start), out, lse);
  }
}

void forward_into(const Paged& args, const at::Tensor& out, const at::Tensor& lse) {
  const c10::cuda::CUDAGuard device_guard(args.query.device());
  graph::require_sm80("cudnn_ops.paged_attention", args.query.get_device());
  if (out.numel() == 0) return;
  if (args.key_cache.numel() == 0 || args.page_table.numel() == 0) {
    return fill_with_nothing(out, lse, args.sinks);
  }
  check_addressable(args.key_cache, "key_cache");
  check_addressable(args.value_cache, "value_cache");
  if (is_decoded_by_kernel(args)) return decode_by_kernel(args, out, lse);
  if (graph::is_addressable(args.query)) return run_in_parts(args, out, lse);
  Paged copied = args;
  copied.query = args.query.clone(at::MemoryFormat::Contiguous);
  run_in_parts(copied, out, lse);
}

// The output, and with_lse the log-sum-exp.
OutAndLse forward(const Paged& args, bool with_lse) {
  if (is_decoded_by_kernel(args)) {
    const int64_t rows = args.query.size(0);
    const at::Tensor out = empty_out(args, rows);
    at::Tensor lse;
    if (with_lse && !args.is_packed()) lse = empty_lse(args, rows);
    if (with_lse && args.is_packed()) {
      lse = at::detail::empty_cuda({args.query.size(1), rows}, at::kFloat, out.device(),
                                   std::nullopt);
    }
    forward_into(args, out, lse);
    return {out, lse};
  }
  if (is_packed_batch(args)) {
    auto [out, lse] = forward(batch_of(args), with_lse);
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
  if (is_decoded_by_kernel(args)) {
    if (graph::is_addressable(out)) return forward_into(args, out, at::Tensor());
    out.copy_(std::get<0>(forward(args, /*with_lse=*/false)));
    return;
  }
  if (is_packed_batch(args)) return write_out(batch_of(args), out.unsqueeze(1));
  const bool has_room = out.size(0) == rows_of(args) && graph::is_addressable(out);
  if (has_room) return forward_into(args, out, at::Tensor());
  out.copy_(std::get<0>(forward(args, /*with_lse=*/false)));
}

void paged_out_cuda(const PagedInto<at::Tensor>& given) {
  check_paged(given.args);
  check_paged_out(given.args, given.out);
  write_out(given.args, given.out);
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  using namespace cudnn_ops;
  m.impl("paged_attention", kernel<paged_cuda>);
  m.impl("paged_attention_with_lse", kernel<paged_with_lse_cuda>);
  m.impl("_paged_attention_out", kernel<paged_out_cuda>);
}
