#include "ops/attention/dense/sdpa_part.h"

#include "ops/attention/layout.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>

#include <algorithm>

namespace cudnn_ops {

SdpaPart::SdpaPart(const Sdpa& whole, Along along, int64_t start, int64_t size)
    : along_(along),
      start_(start),
      size_(size),
      group_(whole.query.size(1) / std::max<int64_t>(whole.key.size(1), 1)),
      args_(whole) {
  args_.query = of_query(whole.query);
  args_.key = of_key(whole.key);
  args_.value = of_key(whole.value);
  if (whole.attn_mask) args_.attn_mask = of_mask(*whole.attn_mask);
  if (along == Along::kKeyHeads) {
    for (auto* of_heads : {&args_.alibi_slopes, &args_.sinks}) {
      if (*of_heads) *of_heads = cut(**of_heads, 0, group_);
    }
  }
  if (along == Along::kBatch) {
    for (auto* lengths : {&args_.seq_lens_q, &args_.seq_lens_kv}) {
      if (*lengths) *lengths = cut(**lengths, 0, 1);
    }
  }
}

at::Tensor SdpaPart::of_query(const at::Tensor& tensor) const {
  switch (along_) {
    case Along::kBatch: return cut(tensor, 0, 1);
    case Along::kKeyHeads: return cut(tensor, 1, group_);
    case Along::kQueries: return cut(tensor, 2, 1);
    case Along::kKeys: break;
  }
  return tensor;
}

at::Tensor SdpaPart::of_key(const at::Tensor& tensor) const {
  switch (along_) {
    case Along::kBatch: return cut(tensor, 0, 1);
    case Along::kKeyHeads: return cut(tensor, 1, 1);
    case Along::kQueries: break;
    case Along::kKeys: return cut(tensor, 2, 1);
  }
  return tensor;
}

at::Tensor SdpaPart::of_mask(const at::Tensor& tensor) const {
  // A mask has up to four dimensions, each of size 1 where it is the same for all.
  const int64_t dim = static_cast<int64_t>(along_) + tensor.dim() - 4;
  if (dim < 0 || tensor.size(dim) == 1) return tensor;
  return cut(tensor, dim, along_ == Along::kKeyHeads ? group_ : 1);
}

SdpaWithMoreQueries::SdpaWithMoreQueries(const Sdpa& whole, int64_t before, int64_t behind,
                                         const Band& band)
    : before_(before), behind_(behind), length_(whole.query.size(2)), args_(whole) {
  args_.query = longer(whole.query);
  args_.is_causal = false;
  args_.window_size = {band.left, band.right};
  args_.bottom_right = band.bottom_right;
  if (whole.seq_lens_kv && !whole.seq_lens_q) {
    args_.seq_lens_q =
        at::full({whole.query.size(0)}, length_, whole.seq_lens_kv->options().dtype(at::kInt));
  }
}

at::Tensor SdpaWithMoreQueries::longer(const at::Tensor& tensor) const {
  auto sizes = tensor.sizes().vec();
  sizes[2] += before_ + behind_;
  const at::Tensor result =
      at::empty_strided(sizes, dense_strides_like(sizes, tensor), tensor.options());
  if (before_ > 0) result.narrow(2, 0, before_).zero_();
  if (behind_ > 0) result.narrow(2, sizes[2] - behind_, behind_).zero_();
  own(result).copy_(tensor);
  return result;
}

}  // namespace cudnn_ops
