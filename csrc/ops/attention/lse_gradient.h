// The gradient of a log-sum-exp, by the backward of attention.
//
// d lse_i / d score_ij is the probability P_ij, so with g the gradient of lse that of the scores is
// P_ij g_i. The backward computes P_ij (grad_out_i . value_j - grad_out_i . out_i): with out zero
// and grad_out_i . value_j = g_i that is it. In the value's type g is kept as a sum of two.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>

namespace cudnn_ops {

struct LseGradient {
  at::Tensor g;  // as grad_lse; 0 where nothing is attended to: there lse is a constant
  at::Tensor value, out, grad_out;

  // `rows` of grad_lse are those of the output: [..., D] without the last.
  LseGradient(const at::Tensor& attended, const at::Tensor& grad_lse, const at::Tensor& lse)
      : g(grad_lse.masked_fill(lse.isneginf(), 0.0)), value(at::zeros_like(attended)) {
    value.narrow(-1, 0, 2).fill_(1.0);
    const auto dtype = attended.scalar_type();
    const at::Tensor high = g.to(dtype), low = g.sub(high).to(dtype);
    auto sizes = g.sym_sizes().vec();
    sizes.push_back(attended.sym_size(-1));
    out = attended.new_zeros_symint(sizes);
    grad_out = at::cat(
        {high.unsqueeze(-1), low.unsqueeze(-1), out.narrow_symint(-1, 2, sizes.back() - 2)}, -1);
  }
};

// Either may be undefined.
inline void add_gradient(at::Tensor& sum, const at::Tensor& term) {
  sum = sum.defined() ? sum.add(term) : term;
}

// For the value: the log-sum-exp does not depend on it.
inline void or_zeros(at::Tensor& gradient, const at::Tensor& of) {
  if (!gradient.defined()) gradient = at::zeros_like(of);
}

}  // namespace cudnn_ops
