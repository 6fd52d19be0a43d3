#include "ops/attention/check.h"

#include <ATen/ops/diff.h>
#include <ATen/ops/max.h>
#include <ATen/ops/min.h>

#include <cmath>

namespace cudnn_ops {
namespace {

bool is_attention_dtype(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  if (dtype == at::kHalf || dtype == at::kBFloat16) return true;
  return !tensor.is_cuda() && (dtype == at::kFloat || dtype == at::kDouble);
}

}  // namespace

bool is_multiple(const c10::SymInt& heads, const c10::SymInt& of) {
  if (known(of.sym_eq(0))) return known(heads.sym_eq(0));
  return holds(of.sym_ge(1)) && holds((heads % of).sym_eq(0));
}

void check_supported(const at::Tensor& tensor, const char* name, const char* op) {
  TORCH_CHECK_TYPE(is_attention_dtype(tensor), op, name, " has dtype ", tensor.scalar_type(),
                   "; on a GPU it must be float16 or bfloat16 (use torch.autocast or "
                   ".bfloat16()), on a CPU float32 and float64 too",
                   at::isFloat8Type(tensor.scalar_type())
                       ? "; cudnn_ops.sdpa_fp8 takes 8 bits, and their scales"
                       : "");
  const auto head_size = tensor.sym_size(-1);
  TORCH_CHECK_VALUE(holds((head_size % 8).sym_eq(0)) && holds(head_size.sym_ge(8)), op,
                    "the head size of ", name, " is ", head_size,
                    "; cuDNN supports multiples of 8 from 8 on: pad the last dimension with zeros");
}

namespace {

void check_number_per_head(const at::Tensor& tensor, const at::Tensor& query, const char* name,
                           const char* op, int64_t head_dim) {
  const c10::SymInt heads = query.sym_size(head_dim);
  TORCH_CHECK_VALUE(tensor.dim() == 1 && holds(tensor.sym_size(0).sym_eq(heads)) &&
                        tensor.device() == query.device() && tensor.is_floating_point(),
                    op, name, " must hold one floating-point number for each query head, [", heads,
                    "] on ", query.device(), "; got ", tensor.scalar_type(), " ",
                    tensor.sym_sizes(), " on ", tensor.device());
}

}  // namespace

void check_per_head(const AttentionOptions& options, const at::Tensor& query, const char* op,
                    int64_t head_dim) {
  if (options.alibi_slopes) {
    check_number_per_head(*options.alibi_slopes, query, "alibi_slopes", op, head_dim);
  }
  if (options.sinks) check_number_per_head(*options.sinks, query, "sinks", op, head_dim);
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

void check_seq_lens(const OptionalTensor& lengths, const at::Tensor& query,
                    const c10::SymInt& length, const char* name, const char* op) {
  if (!lengths) return;
  TORCH_CHECK_VALUE(lengths->dim() == 1 && holds(lengths->sym_size(0).sym_eq(query.sym_size(0))) &&
                        lengths->device() == query.device() &&
                        (lengths->scalar_type() == at::kInt || lengths->scalar_type() == at::kLong),
                    op, name, " must be an int32 tensor [batch], [", query.sym_size(0), "] on ",
                    query.device(), "; got ", lengths->scalar_type(), " ", lengths->sym_sizes(),
                    " on ", lengths->device());
  if (!checks_values(*lengths) || lengths->numel() == 0) return;
  const auto least = lengths->min().item<int64_t>(), most = lengths->max().item<int64_t>();
  TORCH_CHECK_VALUE(least >= 0 && length >= most, op, name, " holds lengths from ", least, " to ",
                    most, "; the tensors have ", length);
}

void check_options(const AttentionOptions& options, const at::Tensor& query, const char* op) {
  const c10::IntArrayRef window_size = options.window_size;
  const auto& rng_state = options.rng_state;
  const double dropout_p = options.dropout_p, softcap = options.softcap;
  TORCH_CHECK_VALUE(!options.scale || std::isfinite(static_cast<float>(*options.scale)), op,
                    "scale must be a finite float32, got ", options.scale.value_or(0.0),
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

}  // namespace cudnn_ops
