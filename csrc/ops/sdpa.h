// Scaled dot-product attention: what its files share. See cudnn_ops/ops/sdpa.py for the
// meaning of the arguments and the formulas.
#pragma once

#include "../graph/plan_key.h"
#include "../graph/tensor_desc.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <memory>
#include <optional>
#include <tuple>

namespace cudnn_ops {

// cuDNN 9.19 computes the gradients of query and key wrongly, and says nothing, for what lies
// beyond 2^31 elements (measured on an H200, where torch's own cuDNN backend gives the same
// wrong numbers; the forward is right). Larger problems are computed in parts.
constexpr int64_t kMaxBackwardElements = int64_t{1} << 31;
// Its backward also launches a row of blocks for each batch entry and for each head, and CUDA
// takes no more rows than this.
constexpr int64_t kMaxBackwardRows = 65535;

// Everything that a forward plan bakes in. The scale is passed at run time; log-sum-exp is
// always a dense [B, Hq, Sq], so its layout follows from the query's sizes.
//
// A ragged plan is declared for a batch and for lengths that its calls need not fill: it is told
// at run time where each sequence begins and how long it is (sdpa_ragged.h).
struct SdpaForwardParams {
  static constexpr const char* kName = "sdpa";
  graph::TensorDesc query, key, value, out;
  bool is_causal = false;
  bool with_lse = false;
  bool is_ragged = false;

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor&& visit) {
    visit("query", self.query);
    visit("key", self.key);
    visit("value", self.value);
    visit("out", self.out);
    visit("is_causal", self.is_causal);
    visit("with_lse", self.with_lse);
    visit("is_ragged", self.is_ragged);
  }
};

struct SdpaBackwardParams {
  static constexpr const char* kName = "sdpa_backward";
  graph::TensorDesc query, key, value, out, grad_out, grad_query, grad_key, grad_value;
  bool is_causal = false;
  bool is_deterministic = false;
  bool is_ragged = false;

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor&& visit) {
    visit("query", self.query);
    visit("key", self.key);
    visit("value", self.value);
    visit("out", self.out);
    visit("grad_out", self.grad_out);
    visit("grad_query", self.grad_query);
    visit("grad_key", self.grad_key);
    visit("grad_value", self.grad_value);
    visit("is_causal", self.is_causal);
    visit("is_deterministic", self.is_deterministic);
    visit("is_ragged", self.is_ragged);
  }
};

// Plans (sdpa_graph.cpp) take their addresses in the order  query, key, value, scale, out[, lse]
// and  query, key, value, scale, out, lse, grad_out, grad_query, grad_key, grad_value.  Ragged
// ones then take the offsets of every tensor of 4 dimensions in that order, and the lengths of
// the queries and of the keys.

// Raises ValueError, TypeError or NotImplementedError with a sentence that names the argument.
// Sizes may be symbolic: it serves the fake kernel as well as the real ones.
void check_sdpa(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                const std::optional<at::Tensor>& attn_mask, double dropout_p,
                std::optional<double> scale, bool enable_gqa);
// The part of it that is about sizes, strides and devices.
void check_sdpa_shapes(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                       bool enable_gqa);
void check_sdpa_backward(const at::Tensor& grad_out, const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse);

// Strides of a dense tensor of `sizes` [B, H, S, D] whose first three dimensions lie in memory
// in the order of those of `like`, and whose last is contiguous.
std::array<int64_t, 4> dense_strides_like(c10::IntArrayRef sizes, const at::Tensor& like);

using Sdpa = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                        const std::optional<at::Tensor>&, double, bool, std::optional<double>,
                        bool);
using SdpaWithLse = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&,
                                                       const at::Tensor&,
                                                       const std::optional<at::Tensor>&, double,
                                                       bool, std::optional<double>, bool);
using SdpaBackward = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
    const at::Tensor&, bool, std::optional<double>);

const c10::TypedOperatorHandle<Sdpa>& sdpa_op();
const c10::TypedOperatorHandle<SdpaWithLse>& sdpa_with_lse_op();
const c10::TypedOperatorHandle<SdpaBackward>& sdpa_backward_op();

}  // namespace cudnn_ops
