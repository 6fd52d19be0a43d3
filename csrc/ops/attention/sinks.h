// The sinks' part in a backward. A sink takes part in the sum that a row's weights are divided by,
// and has no value.
#pragma once

#include <ATen/core/Tensor.h>

namespace cudnn_ops {

// Sums exp(sink - lse) * terms over all but the heads: [H], from `terms` and `lse` [..., H, rows].
// A row that attends to nothing has no sum, and adds nothing.
inline at::Tensor sum_over_sinks(const at::Tensor& sinks, const at::Tensor& terms,
                                 const at::Tensor& lse) {
  const at::Tensor weight = sinks.to(lse.scalar_type()).unsqueeze(-1).sub(lse).exp();
  at::Tensor sum = weight.mul(terms).masked_fill(lse.isneginf(), 0.0).sum(-1);
  if (sum.dim() > 1) sum = sum.sum(0);
  return sum.to(sinks.scalar_type());
}

// d loss / d sink = - sum over batch and queries of exp(sink - lse) * (grad_out . out).
// `delta`: grad_out . out, [..., H, rows].
inline at::Tensor gradient_of_sinks(const at::Tensor& sinks, const at::Tensor& delta,
                                    const at::Tensor& lse) {
  return sum_over_sinks(sinks, delta, lse).neg();
}

}  // namespace cudnn_ops
