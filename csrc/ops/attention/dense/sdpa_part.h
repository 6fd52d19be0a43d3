// Attention problems made from others: parts, and some with more queries. What a part leaves out,
// and what additional queries give, is for the caller to say.
#pragma once

#include "ops/attention/band.h"
#include "ops/attention/dense/sdpa.h"

namespace cudnn_ops {

enum class Along { kBatch, kKeyHeads, kQueries, kKeys };

// Some batch entries, heads, queries or keys: views of the tensors of the whole.
class SdpaPart {
 public:
  SdpaPart(const Sdpa& whole, Along along, int64_t start, int64_t size);

  const Sdpa& args() const {
    return args_;
  }
  // The same part of what lies as the query does (out, log-sum-exp), as the key does, as the mask.
  at::Tensor of_query(const at::Tensor& tensor) const;
  at::Tensor of_key(const at::Tensor& tensor) const;
  at::Tensor of_mask(const at::Tensor& tensor) const;

 private:
  at::Tensor cut(const at::Tensor& tensor, int64_t dim, int64_t unit) const {
    return tensor.narrow(dim, start_ * unit, size_ * unit);
  }

  Along along_;
  int64_t start_, size_;
  int64_t group_;  // query heads that share a key head
  Sdpa args_;
};

// With zeros added to the queries, before the others, which moves the diagonal, or behind them, and
// with another band.
class SdpaWithMoreQueries {
 public:
  SdpaWithMoreQueries(const Sdpa& whole, int64_t before, int64_t behind, const Band& band);

  const Sdpa& args() const {
    return args_;
  }
  // From a tensor that lies as the query does to the longer one, and back.
  at::Tensor longer(const at::Tensor& tensor) const;
  at::Tensor own(const at::Tensor& tensor) const {
    return tensor.narrow(2, before_, length_);
  }

 private:
  int64_t before_, behind_, length_;
  Sdpa args_;
};

}  // namespace cudnn_ops
