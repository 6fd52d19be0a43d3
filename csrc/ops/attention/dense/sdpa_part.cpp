#include "ops/attention/dense/sdpa_part.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>

#include <algorithm>

namespace cudnn_ops {

AttentionPart::AttentionPart(const Attention& whole, Along along, int64_t start, int64_t size)
    : whole_(whole),
      along_(along),
      start_(start),
      size_(size),
      group_(whole.query.size(1) / std::max<int64_t>(whole.key.size(1), 1)),
      query_(of_query(whole.query)),
      key_(of_key(whole.key)),
      value_(of_key(whole.value)),
      seq_lens_q_(cut_batch(whole.seq_lens_q)),
      seq_lens_kv_(cut_batch(whole.seq_lens_kv)) {
  if (whole.attn_mask) mask_ = of_mask(*whole.attn_mask);
  if (whole.alibi_slopes) alibi_slopes_ = of_heads(*whole.alibi_slopes);
  if (whole.sinks) sinks_ = of_heads(*whole.sinks);
}

at::Tensor AttentionPart::of_query(const at::Tensor& tensor) const {
  switch (along_) {
    case Along::kBatch: return cut(tensor, 0, 1);
    case Along::kKeyHeads: return cut(tensor, 1, group_);
    case Along::kQueries: return cut(tensor, 2, 1);
    case Along::kKeys: break;
  }
  return tensor;
}

at::Tensor AttentionPart::of_key(const at::Tensor& tensor) const {
  switch (along_) {
    case Along::kBatch: return cut(tensor, 0, 1);
    case Along::kKeyHeads: return cut(tensor, 1, 1);
    case Along::kQueries: break;
    case Along::kKeys: return cut(tensor, 2, 1);
  }
  return tensor;
}

at::Tensor AttentionPart::of_mask(const at::Tensor& tensor) const {
  // Of up to four dimensions, any of them of size 1 for all.
  const int64_t dim = static_cast<int64_t>(along_) + tensor.dim() - 4;
  if (dim < 0 || tensor.size(dim) == 1) return tensor;
  return cut(tensor, dim, along_ == Along::kKeyHeads ? group_ : 1);
}

at::Tensor AttentionPart::of_heads(const at::Tensor& tensor) const {
  return along_ == Along::kKeyHeads ? cut(tensor, 0, group_) : tensor;
}

OptionalTensor AttentionPart::cut_batch(const OptionalTensor& tensor) const {
  return tensor && along_ == Along::kBatch ? OptionalTensor(cut(*tensor, 0, 1)) : tensor;
}

AttentionWithMoreQueries::AttentionWithMoreQueries(const Attention& whole, int64_t before,
                                                   int64_t behind, const Band& band)
    : whole_(whole),
      before_(before),
      behind_(behind),
      window_size_{band.left, band.right},
      bottom_right_(band.bottom_right),
      query_(longer(whole.query)),
      seq_lens_q_(whole.seq_lens_q) {
  if (whole.seq_lens_kv && !seq_lens_q_) {
    seq_lens_q_ = at::full({whole.query.size(0)}, whole.query.size(2),
                           whole.seq_lens_kv->options().dtype(at::kInt));
  }
}

at::Tensor AttentionWithMoreQueries::longer(const at::Tensor& tensor) const {
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
