#include "paged_problem.h"
#include "sdpa_ragged.h"

namespace cudnn_ops {
namespace {

using graph::TensorDesc;

int64_t power_of_2(int64_t least, int64_t n) {
  int64_t power = least;
  while (power < n) power *= 2;
  return power;
}

// [B, S, H, D] as [declared, H, S, D]. The stride of a dimension of size 1 means nothing.
TensorDesc batched(const at::Tensor& tensor, int64_t declared) {
  const int64_t length = tensor.size(1), heads = tensor.size(2), size = tensor.size(3);
  const int64_t head = heads > 1 ? tensor.stride(2) : size;
  const int64_t token = length > 1 ? tensor.stride(1) : heads * head;
  const int64_t sequence = tensor.size(0) > 1 ? tensor.stride(0) : length * token;
  return {tensor.scalar_type(), {declared, heads, length, size}, {sequence, head, token, 1}};
}

// [tokens, H, D] as a ragged plan declares it: the stride of a sequence is of no account.
TensorDesc packed(c10::ScalarType dtype, int64_t heads, int64_t size, int64_t head, int64_t token,
                  int64_t declared, int64_t length) {
  return {dtype, {declared, heads, length, size}, {length * token, head, token, 1}};
}

TensorDesc cache(const at::Tensor& tensor, const Paged& args) {
  return TensorDesc::of(args.head_major ? tensor : tensor.transpose(1, 2));
}

SdpaMask mask_of(const Paged& args, bool is_single, bool has_sinks) {
  SdpaMask mask;
  mask.left = args.window_size[0];
  mask.right = args.is_causal ? 0 : args.window_size[1];
  // The only query sees nothing beyond itself, for there is nothing.
  if (is_single) mask.right = mask.left == kUnbounded ? kUnbounded : 0;
  mask.bottom_right = mask.left != kUnbounded || mask.right != kUnbounded;
  mask.has_softcap = args.softcap > 0;
  mask.has_sinks = has_sinks;
  mask.sequences = args.is_packed() ? Sequences::kRagged : Sequences::kLengths;
  return mask;
}

}  // namespace

int64_t packed_lse_stride(int64_t tokens) {
  return power_of_2(1024, tokens);
}

PagedProblem::PagedProblem(const Paged& args, bool with_lse) {
  const auto& query = args.query;
  const int64_t declared = declared_batch(args.page_table.size(0));
  const int64_t heads = query.size(-2), size = query.size(-1),
                value_size = args.value_cache.size(3);
  const int64_t longest = args.is_packed() ? args.max_seqlen_q.expect_int() : query.size(1);
  const bool is_single = longest == 1;
  has_sinks_afterwards = args.sinks && is_single;
  params.key_cache = cache(args.key_cache, args);
  params.value_cache = cache(args.value_cache, args);
  const int64_t width = power_of_2(1, args.page_table.size(1));
  params.page_table = {at::kInt, {declared, 1, width, 1}, {width, width, 1, 1}};
  params.mask = mask_of(args, is_single, args.sinks && !is_single);
  params.with_lse = with_lse || has_sinks_afterwards;
  const auto dtype = query.scalar_type();
  if (args.is_packed()) {
    const int64_t length = is_single ? 1 : declared_length(longest);
    const int64_t head = heads > 1 ? query.stride(1) : size;
    const int64_t token = query.size(0) > 1 ? query.stride(0) : heads * head;
    params.query = packed(dtype, heads, size, head, token, declared, length);
    params.out = packed(dtype, heads, value_size, value_size, heads * value_size, declared, length);
    if (params.with_lse) params.lse_stride = packed_lse_stride(query.size(0));
  } else {
    params.query = batched(query, declared);
    params.out = {dtype,
                  {declared, heads, longest, value_size},
                  {longest * heads * value_size, value_size, heads * value_size, 1}};
  }
}

}  // namespace cudnn_ops
