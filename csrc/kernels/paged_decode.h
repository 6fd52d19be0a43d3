// Attention over pages by kernels of ours (paged_decode.cu, paged_plan.cu): for few queries of each
// sequence, limited by how fast the cache is read, and for caches of 8 bits.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace cudnn_ops {

// How many queries and keys there are, and which of them see each other.
struct PagedQueries {
  const at::Tensor& seq_lens_kv;                  // int32 [B]
  const std::optional<at::Tensor>& cu_seqlens_q;  // [B + 1], or none
  int64_t queries;                                // of each sequence, or with offsets at most
  int64_t group;                                  // query heads of a key head
  int64_t left, right;                            // keys on each side of a query's own; -1: all
  bool bottom_right;
};

// What makes equal parts of sequences of any lengths, int32 [kPagedSums + B + 1]
// (paged_decode_call.h). It holds until the lengths change, for calls one after the other. On the
// current device and stream, as the next.
at::Tensor make_paged_plan(const PagedQueries& queries);

// The rest of a call.
struct PagedDecode {
  const at::Tensor& query;  // [B, Sq, H, D] or [tokens, H, D]; the last stride is 1
  // [pages, page size, Hkv, D], in the query's type or E4M3; head_major: heads first. Pages, tokens
  // and heads lie at multiples of 16 bytes, and the page size is a power of 2.
  const at::Tensor &key_cache, &value_cache;
  const at::Tensor& page_table;                           // int32 [B, width]
  const std::optional<at::Tensor>&descale_k, &descale_v;  // float32, one or for each key head
  const std::optional<at::Tensor>& sinks;                 // [H]
  bool head_major;
  float scale, softcap;
};

// Whether there is a kernel for these types and head sizes.
inline bool has_paged_decode(at::ScalarType query, at::ScalarType cache, int64_t size,
                             int64_t value_size) {
  return (query == at::kHalf || query == at::kBFloat16) &&
         (cache == query || cache == at::kFloat8_e4m3fn) && (size == 64 || size == 128) &&
         value_size == size;
}

// Writes `out`, of the query's sizes and contiguous, at a multiple of 8 bytes, and where it is
// defined `lse`, float32 [B, H, Sq] or [H, tokens]. There are queries, heads and a page. Without a
// plan it makes one where it needs one: for many sequences, and while a CUDA graph is captured. Few
// sequences have clusters of blocks, which need none, and do not read it.
void decode_pages(const PagedQueries& queries, const PagedDecode& args,
                  const std::optional<at::Tensor>& plan, const at::Tensor& out,
                  const at::Tensor& lse);

}  // namespace cudnn_ops
