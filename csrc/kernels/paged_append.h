// Writing new keys and values into a paged cache, by one kernel (paged_append.cu).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace cudnn_ops {

// `key` and `value`: [tokens, H, D]; the caches: [pages, page size, H, D], or heads before tokens.
// `slot_mapping`: int64 [tokens], the page times the page size plus the place in it; tokens with a
// slot that does not exist are left out. Neither tokens nor slots are empty. Where the caches are
// of E4M3 and the tokens half, bfloat16 or float, these are divided by the descales (float32, one
// number or one for each head; 1 where there is none) and rounded. On the current device and
// stream.
void append_to_pages(const at::Tensor& key_cache, const at::Tensor& value_cache,
                     const at::Tensor& key, const at::Tensor& value, const at::Tensor& slot_mapping,
                     bool head_major, const std::optional<at::Tensor>& descale_k,
                     const std::optional<at::Tensor>& descale_v);

}  // namespace cudnn_ops
