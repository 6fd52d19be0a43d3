// Attention over packed sequences on CUDA: a ragged plan, declared for a rounded-up number of
// sequences and length, that is told at run time where each begins. The host reads none of it.

#include "ops/attention/packed/varlen_part.h"
#include "ops/attention/packed/varlen_problem.h"
#include "ops/attention/packed/varlen_table.h"
#include "ops/attention/plan_tensors_cuda.h"
#include "ops/attention/polymorphic.h"
#include "ops/attention/sinks.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/index.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/zeros_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>

namespace cudnn_ops {
namespace {

constexpr CallName kCall{"cudnn_ops.varlen_attention",
                         "`python -m cudnn_ops support` shows what cuDNN supports on a GPU; "
                         "torch.nn.attention.varlen has kernels for the rest"};
constexpr CallName kBackwardCall{
    "cudnn_ops.varlen_attention backward",
    "`python -m cudnn_ops support` shows what cuDNN supports on a GPU; call the forward under "
    "torch.no_grad(), or use torch.nn.attention.varlen"};

MaskTensors mask_tensors_of(const Varlen& args, bool backward) {
  return MaskTensors::of(args, args.query, args.max_seqlen_q, args.max_seqlen_k, !backward);
}

int64_t lse_stride(const Varlen& args) {
  return lse_stride(args, at::cuda::getCurrentDeviceProperties()->major);
}

// [H, tokens], with room for what the plan declares.
at::Tensor empty_lse(const Varlen& args) {
  const int64_t tokens = args.query.size(0), stride = std::max(lse_stride(args), tokens);
  const at::Tensor memory = at::detail::empty_cuda({args.query.size(1), stride}, at::kFloat,
                                                   args.query.device(), std::nullopt);
  return memory.narrow(1, 0, tokens);
}

// Which sequence each query belongs to, and which one it is there: indices into a dense
// log-sum-exp.
c10::List<std::optional<at::Tensor>> places(const Varlen& args) {
  const at::Tensor token = at::arange(args.query.size(0), args.cu_seqlens_q.options());
  const at::Tensor ends = args.cu_seqlens_q.narrow(0, 1, args.cu_seqlens_q.size(0) - 1);
  const at::Tensor sequence =
      at::searchsorted(ends.contiguous(), token, false, /*right=*/true).clamp_max(ends.size(0) - 1);
  const at::Tensor position = token.sub(args.cu_seqlens_q.index_select(0, sequence));
  c10::List<std::optional<at::Tensor>> indices;
  indices.push_back(sequence);
  indices.push_back(position.to(at::kLong));
  return indices;
}

// The log-sum-exp of all sequences, for plans that compute at most so many of them at a time, with
// room for what the last plan declares beyond them.
at::Tensor dense_lse(const Varlen& args, int64_t most) {
  const int64_t sequences = args.cu_seqlens_q.size(0) - 1;
  const int64_t last = (sequences - 1) / most * most;
  return at::detail::empty_cuda(
      {last + declared_batch(sequences - last), args.query.size(1), Declared(args).length},
      at::kFloat, args.query.device(), std::nullopt);
}

// The part of it that a plan is given.
at::Tensor of_sequences(const at::Tensor& dense, const Varlen& part, int64_t start) {
  return dense.narrow(0, start, Declared(part).sequences);
}

// `lse` is what the plan writes: [H, tokens] of empty_lse, or where `stride_of_lse` is 0 the dense
// one of these sequences, or undefined.
void run_forward(const Varlen& args, const at::Tensor& out, const at::Tensor& lse,
                 int64_t stride_of_lse) {
  const Declared declared(args);
  const Scale scale(args.scale, args.query);
  SdpaForwardTensors tensors{readable(scale.applied_to(args.query)),
                             readable(args.key),
                             readable(args.value),
                             mask_tensors_of(args, /*backward=*/false),
                             scale.value,
                             static_cast<float>(args.softcap),
                             out,
                             lse};
  const auto params =
      varlen_params(args, tensors.query, tensors.key, tensors.value, lse.defined(), stride_of_lse);
  SdpaPointers pointers(params, tensors);
  pointers.written.clear();
  VarlenTable table(args, declared.sequences);
  table.add_offsets(tensors.query, false);
  table.add_offsets(tensors.key, true);
  table.add_offsets(tensors.value, true);
  table.add_offsets(out, false);
  if (stride_of_lse != 0) table.add_offsets(1, false);
  table.make(pointers.all);
  const graph::Call call = call_of(kCall, pointers);
  graph::execute(call, *graph::get_plan(call, graph::PlanKey::of(params, args.query.get_device())));
}

// `lse` is that of empty_lse, or undefined.
void run_forward_in_parts(const Varlen& args, const at::Tensor& out, const at::Tensor& lse) {
  const int64_t stride_of_lse = lse.defined() ? lse_stride(args) : 0;
  const bool is_dense = lse.defined() && stride_of_lse == 0;
  const at::Tensor written = is_dense ? dense_lse(args, kMaxBackwardRows) : lse;
  for_sequences(args, kMaxBackwardRows, [&](const Varlen& part, int64_t start) {
    run_forward(part, out, is_dense ? of_sequences(written, part, start) : written, stride_of_lse);
  });
  if (is_dense) lse.t().copy_(at::index(written.transpose(1, 2), places(args)));
}

OutAndLse forward(const Varlen& args, bool with_lse) {
  check_varlen(args);
  const auto& query = args.query;
  const c10::cuda::CUDAGuard device_guard(query.device());
  graph::require_sm80("cudnn_ops.varlen_attention", query.get_device());
  const at::Tensor out = at::detail::empty_cuda({query.size(0), query.size(1), args.value.size(2)},
                                                query.scalar_type(), query.device(), std::nullopt);
  at::Tensor lse;
  if (with_lse) lse = empty_lse(args);
  const bool is_empty = out.numel() == 0 || args.key.size(0) == 0 || args.cu_seqlens_q.size(0) == 1;
  if (is_empty || !are_same_tokens(args)) fill_with_nothing(out, lse, args.sinks);
  if (!is_empty) run_forward_in_parts(args, out, lse);
  return {out, with_lse ? lse.contiguous() : lse};
}

at::Tensor varlen_cuda(const Varlen& args) {
  if (!is_regular(args)) return varlen_as_regular(args);
  return std::get<0>(forward(args, /*with_lse=*/false));
}

OutAndLse varlen_with_lse_cuda(const Varlen& args) {
  if (!is_regular(args)) return varlen_with_lse_as_regular(args);
  return forward(args, /*with_lse=*/true);
}

struct Results {
  at::Tensor grad_query, grad_key, grad_value;
};

// As run_forward has it, `given.lse` is what the plan reads. The gradient of a query whose sign
// Scale changed has that sign still.
void run_backward(const VarlenBackward& given, const Results& results, int64_t stride_of_lse) {
  const Varlen& args = given.args;
  const Declared declared(args);
  const Scale scale(args.scale, args.query);
  SdpaBackwardTensors tensors{readable(scale.applied_to(args.query)),
                              readable(args.key),
                              readable(args.value),
                              readable(given.out),
                              given.lse,
                              readable(given.grad_out),
                              mask_tensors_of(args, /*backward=*/true),
                              scale.value,
                              static_cast<float>(args.softcap),
                              results.grad_query,
                              results.grad_key,
                              results.grad_value,
                              at::Tensor()};
  const auto params = varlen_backward_params(args, tensors.query, tensors.key, tensors.value,
                                             tensors.out, tensors.grad_out, stride_of_lse);
  SdpaPointers pointers(params, tensors);
  pointers.written.clear();
  VarlenTable table(args, declared.sequences);
  table.add_offsets(tensors.query, false);
  table.add_offsets(tensors.key, true);
  table.add_offsets(tensors.value, true);
  table.add_offsets(tensors.out, false);
  if (stride_of_lse != 0) table.add_offsets(1, false);
  table.add_offsets(tensors.grad_out, false);
  table.add_offsets(tensors.grad_query, false);
  table.add_offsets(tensors.grad_key, true);
  table.add_offsets(tensors.grad_value, true);
  table.make(pointers.all);
  const graph::Call call = call_of(kBackwardCall, pointers);
  graph::execute(call, *graph::get_plan(call, graph::PlanKey::of(params, args.query.get_device())));
}

// With at most so many sequences at a time.
void run_backward_in_parts(const VarlenBackward& given, const Results& results, int64_t most) {
  const Varlen& args = given.args;
  const int64_t stride_of_lse = lse_stride(args);
  const bool is_dense = stride_of_lse == 0;
  at::Tensor lse;
  if (is_dense) {
    lse = dense_lse(args, most);
    lse.transpose(1, 2).index_put_(places(args), given.lse.t());
  } else if (stride_of_lse == given.lse.size(1)) {
    lse = given.lse.contiguous();
  } else {
    lse = empty_lse(args).copy_(given.lse);
  }
  for_sequences(args, most, [&](const Varlen& part, int64_t start) {
    const at::Tensor read = is_dense ? of_sequences(lse, part, start) : lse;
    run_backward({part, given.grad_out, given.out, read}, results, stride_of_lse);
  });
}

// How many groups of heads the gradients have to be computed in: cuDNN's are wrong beyond 2^31
// elements of what is declared, for at most so many sequences at a time, or of what there is. More
// than there are key heads if one is too much.
int64_t parts_of_heads(const Varlen& args, int64_t most) {
  const Declared declared(args);
  const int64_t size = std::max(args.query.size(2), args.value.size(2));
  const int64_t sequences = std::min(declared.sequences, most);
  const int64_t tokens = std::max({args.query.size(0), args.key.size(0),
                                   sequences * declared.length, sequences * declared.length_kv});
  const int64_t heads = args.key.size(1);
  if (heads == 0 || tokens == 0) return 1;
  const int64_t of_head = tokens * size * (args.query.size(1) / heads);
  const int64_t at_once = std::min(kMaxBackwardElements / std::max<int64_t>(of_head, 1), heads);
  return at_once == 0 ? heads + 1 : (heads + at_once - 1) / at_once;
}

// How many sequences at a time: all, or a power of 2 that leaves less to groups of heads than there
// are heads.
int64_t sequences_at_once(const Varlen& args) {
  int64_t most = kMaxBackwardRows;
  while (most > 1 && parts_of_heads(args, most) > args.key.size(1)) most = (most + 1) / 2;
  return most;
}

void run_backward_by_heads(const VarlenBackward& given, const Results& results, int64_t parts,
                           int64_t most) {
  const Varlen& args = given.args;
  const int64_t heads = args.key.size(1);
  TORCH_CHECK_NOT_IMPLEMENTED(
      parts <= heads && args.dropout_p == 0,
      "cudnn_ops.varlen_attention backward: ", args.query.sizes(), " with at most ",
      args.max_seqlen_q, " tokens a sequence is more than ", "2^31 elements for ",
      args.dropout_p == 0 ? "one key head" : "dropout", "; cuDNN computes such gradients wrongly");
  const int64_t step = (heads + parts - 1) / parts, group = args.query.size(1) / heads;
  for (int64_t start = 0; start < heads; start += step) {
    const int64_t count = std::min(step, heads - start);
    const auto of_query = [&](const at::Tensor& t, int64_t dim) {
      return t.narrow(dim, start * group, count * group);
    };
    const auto of_key = [&](const at::Tensor& t) { return t.narrow(1, start, count).contiguous(); };
    VarlenBackward part{args, of_query(given.grad_out, 1).contiguous(),
                        of_query(given.out, 1).contiguous(), of_query(given.lse, 0)};
    part.args.query = of_query(args.query, 1).contiguous();
    part.args.key = of_key(args.key);
    part.args.value = of_key(args.value);
    if (args.alibi_slopes) part.args.alibi_slopes = of_query(*args.alibi_slopes, 0);
    const Results own{at::zeros_like(part.args.query), at::zeros_like(part.args.key),
                      at::zeros_like(part.args.value)};
    run_backward_in_parts(part, own, most);
    of_query(results.grad_query, 1).copy_(own.grad_query);
    results.grad_key.narrow(1, start, count).copy_(own.grad_key);
    results.grad_value.narrow(1, start, count).copy_(own.grad_value);
  }
}

VarlenGradients varlen_backward_cuda(const VarlenBackward& given) {
  const Varlen& args = given.args;
  check_varlen(args);
  TORCH_CHECK_VALUE(args.dropout_p == 0.0 || args.rng_state,
                    "cudnn_ops.varlen_attention backward: dropout needs the rng_state of the "
                    "forward");
  const c10::cuda::CUDAGuard device_guard(args.query.device());
  const auto empty = [&](const at::Tensor& like) {
    return at::detail::empty_cuda(like.sizes(), like.scalar_type(), like.device(), std::nullopt);
  };
  const Results results{empty(args.query), empty(args.key), empty(args.value)};
  const int64_t sequences = args.cu_seqlens_q.size(0) - 1;
  const bool is_empty = given.out.numel() == 0 || args.key.size(0) == 0 || sequences == 0;
  if (is_empty || !are_same_tokens(args)) {
    for (const auto* tensor : {&results.grad_query, &results.grad_key, &results.grad_value}) {
      tensor->zero_();
    }
  }
  if (!is_empty) {
    TORCH_CHECK_NOT_IMPLEMENTED(args.query.size(1) <= kMaxBackwardRows,
                                "cudnn_ops.varlen_attention backward: cuDNN supports at most ",
                                kMaxBackwardRows, " heads, got ", args.query.size(1));
    const int64_t most = sequences_at_once(args);
    if (const int64_t parts = parts_of_heads(args, most); parts > 1) {
      run_backward_by_heads(given, results, parts, most);
    } else {
      run_backward_in_parts(given, results, most);
    }
    const Scale scale(args.scale, args.query);
    if (scale.query_sign != 1) results.grad_query.mul_(scale.query_sign);
  }
  at::Tensor grad_sinks;
  if (args.sinks) {
    const at::Tensor delta = given.grad_out.to(at::kFloat).mul(given.out).sum(-1).t();
    grad_sinks = gradient_of_sinks(*args.sinks, delta, given.lse);
  } else {
    grad_sinks = empty(args.query.flatten().narrow(0, 0, 0));
  }
  return {results.grad_query, results.grad_key, results.grad_value, grad_sinks};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  using namespace cudnn_ops;
  m.impl("varlen_attention", kernel<varlen_cuda>);
  m.impl("varlen_attention_with_lse", kernel<varlen_with_lse_cuda>);
  m.impl("_varlen_backward", kernel<varlen_backward_cuda>);
}
