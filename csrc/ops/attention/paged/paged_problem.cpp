#include "ops/attention/paged/paged_problem.h"
#include "ops/attention/band.h"
#include "ops/attention/polymorphic.h"

namespace cudnn_ops {
namespace {

using graph::TensorDesc;

int64_t power_of_2(int64_t least, int64_t n) {
  int64_t power = least;
  while (power < n) power *= 2;
  return power;
}

// [B, S, H, D] as [declared, H, S, D]; dense where it has to be copied for want of sequences. The
// stride of a dimension of size 1 means nothing.
TensorDesc batched(const at::Tensor& tensor, int64_t declared) {
  const int64_t length = tensor.size(1), heads = tensor.size(2), size = tensor.size(3);
  const bool is_copied = tensor.size(0) < declared;
  const int64_t head = heads > 1 && !is_copied ? tensor.stride(2) : size;
  const int64_t token = length > 1 && !is_copied ? tensor.stride(1) : heads * head;
  const int64_t sequence = tensor.size(0) > 1 && !is_copied ? tensor.stride(0) : length * token;
  return {tensor.scalar_type(), {declared, heads, length, size}, {sequence, head, token, 1}};
}

// [tokens, H, D] as a ragged plan declares it: the stride of a sequence is of no account.
TensorDesc packed(c10::ScalarType dtype, int64_t heads, int64_t size, int64_t head, int64_t token,
                  int64_t declared, int64_t length) {
  return {dtype, {declared, heads, length, size}, {length * token, head, token, 1}};
}

// [pages, page size, H, D] as [pages, H, page size, D].
TensorDesc cache(const at::Tensor& tensor, const Paged& args) {
  TensorDesc desc = TensorDesc::of(tensor);
  if (!args.head_major) {
    std::swap(desc.sizes[1], desc.sizes[2]);
    std::swap(desc.strides[1], desc.strides[2]);
  }
  return desc;
}

// One query a sequence, of many heads.
TensorDesc single(const at::Tensor& tensor, int64_t declared, int64_t heads, int64_t size) {
  return {tensor.scalar_type(), {declared, heads, 1, size}, {heads * size, size, heads * size, 1}};
}

Band band_of(const Paged& args) {
  return Band::of(args);
}

// Measured on an H200: 64 rows of a head take 17 % longer than one, and 4 queries in 8 groups of 4
// heads less than a third of the time that they take cuDNN's other engines.
bool is_folded(const Paged& args) {
  constexpr int64_t kMaxQueries = 16, kMaxRows = 64;
  const Band band = band_of(args);
  const bool is_causal = band.bottom_right && band.right == 0;
  if (args.is_packed() || band.left != kUnbounded) return false;
  if (band.right != kUnbounded && !is_causal) return false;
  const int64_t queries = args.query.size(1);
  const int64_t group = args.query.size(2) / args.key_cache.size(args.head_dim());
  return queries > 1 && queries <= kMaxQueries && queries * group <= kMaxRows;
}

SdpaMask mask_of(const Paged& args, bool is_single, bool has_sinks) {
  Band band = band_of(args);
  if (is_single && band.bottom_right) {
    // The only query sees nothing beyond itself, for there is nothing.
    band.right = band.left == kUnbounded ? kUnbounded : 0;
  } else if (is_single) {
    // It sees what comes first, and the plan is told of no more (PagedProblem::most_keys).
    band.left = band.right = kUnbounded;
  }
  SdpaMask mask = mask_of_options(args, band, /*has_alibi=*/false, /*backward=*/false);
  mask.has_sinks = has_sinks;
  mask.sequences = args.is_packed() ? Sequences::kRagged : Sequences::kLengths;
  return mask;
}

// cuDNN's other engines read the table to the end of a tile of keys, whatever the lengths: one that
// ends inside a tile they read beyond its end.
int64_t least_width(const Paged& args) {
  constexpr int64_t kReach = 256;
  return std::max<int64_t>(kReach / args.key_cache.size(args.token_dim()), 1);
}

}  // namespace

int64_t packed_lse_stride(int64_t tokens) {
  return power_of_2(1024, tokens);
}

bool is_packed_batch(const Paged& args) {
  return args.is_packed() && args.has_one_query_each();
}

Paged batch_of(const Paged& packed) {
  Paged batch = packed;
  batch.query = packed.query.unsqueeze(1);
  batch.cu_seqlens_q.reset();
  return batch;
}

PagedProblem::PagedProblem(const Paged& args, bool with_lse) {
  const auto& query = args.query;
  const int64_t declared = declared_batch(args.page_table.size(0));
  const int64_t heads = query.size(-2), size = query.size(-1),
                value_size = args.value_cache.size(3);
  const int64_t longest = args.is_packed() ? args.max_seqlen_q.expect_int() : query.size(1);
  const Band band = band_of(args);
  if (is_folded(args)) {
    queries = longest;
    hidden = band.right == 0 ? queries - 1 : 0;
  }
  const bool is_single = !args.is_packed() && longest == queries;
  if (is_single && !band.bottom_right && band.right != kUnbounded) most_keys = band.right + 1;
  is_merged = is_single && (queries > 1 || args.sinks);
  params.key_cache = cache(args.key_cache, args);
  params.value_cache = cache(args.value_cache, args);
  params.mask = mask_of(args, is_single, args.sinks && !is_single);
  params.with_lse = with_lse || is_merged;
  const auto dtype = query.scalar_type();
  if (args.is_packed()) {
    const int64_t length = declared_length(longest);
    const int64_t head = heads > 1 ? query.stride(1) : size;
    const int64_t token = query.size(0) > 1 ? query.stride(0) : heads * head;
    params.query = packed(dtype, heads, size, head, token, declared, length);
    params.out = packed(dtype, heads, value_size, value_size, heads * value_size, declared, length);
    if (params.with_lse) params.lse_stride = packed_lse_stride(query.size(0));
  } else if (is_single) {
    params.query =
        queries == 1 ? batched(query, declared) : single(query, declared, heads * queries, size);
    params.out = single(query, declared, heads * queries, value_size);
  } else {
    params.query = batched(query, declared);
    params.out = {dtype,
                  {declared, heads, longest, value_size},
                  {longest * heads * value_size, value_size, heads * value_size, 1}};
  }
  const int64_t width = power_of_2(is_decoding() ? 1 : least_width(args), args.page_table.size(1));
  params.page_table = {at::kInt, {declared, 1, width, 1}, {width, width, 1, 1}};
}

}  // namespace cudnn_ops
