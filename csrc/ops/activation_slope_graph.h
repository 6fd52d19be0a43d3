// An activation and its slope from one tanh, as nodes of a cuDNN graph: SiLU and both GELUs are
// x s(x P(x^2)) with the logistic function s and a polynomial P. Only *_graph.cpp include this.
//
// Of cuDNN's nodes the tanh alone is one instruction, right to 2^-11; those of its exp, sigmoid and
// erf, and of the gradients of these activations, take longer than the product leaves time for
// (H200, cuDNN 9.19: a product of 0.0855 ms takes 0.102 to 0.125 with these, 0.16 to 0.23 with
// those).
#pragma once

#include "graph/error.h"
#include "graph/frontend.h"
#include "kernels/activation.h"

#include <memory>
#include <utility>
#include <vector>

namespace cudnn_ops {

// P of an activation, from the lowest power. That of the exact GELU is fitted: its values are
// within 4e-6 of the definition's and its slopes within 1.3e-5, and P grows for ever.
inline std::vector<float> logistic_polynomial(Activation activation) {
  switch (activation) {
    case Activation::kSilu: return {1.0f};
    case Activation::kGeluTanh: return {1.5957691216f, 1.5957691216f * 0.044715f};
    case Activation::kGelu:
      return {1.5956554771f, 7.2914593298e-2f, -2.3476628882e-4f, -6.4026007372e-5f,
              2.3916167279e-6f};
    default: throw graph::NotSupported("cuDNN's graphs have no slope of such an activation");
  }
}

// The value and the slope at `x`, of a rank of 3.
inline std::pair<std::shared_ptr<cudnn_frontend::graph::Tensor_attributes>,
                 std::shared_ptr<cudnn_frontend::graph::Tensor_attributes>>
value_and_slope(graph::FrontendGraph& graph,
                const std::shared_ptr<cudnn_frontend::graph::Tensor_attributes>& x,
                Activation activation) {
  using Mode = cudnn_frontend::PointwiseMode_t;
  using Tensor = std::shared_ptr<cudnn_frontend::graph::Tensor_attributes>;
  const auto number = [&](float value) -> Tensor {
    auto attributes = cudnn_frontend::graph::Tensor_attributes(value);
    return graph.tensor(attributes.set_dim({1, 1, 1}).set_stride({1, 1, 1}));
  };
  const auto node = [](Mode mode) {
    return cudnn_frontend::graph::Pointwise_attributes().set_mode(mode);
  };
  const auto mul = [&](const Tensor& a, const Tensor& b) {
    return graph.pointwise(a, b, node(Mode::MUL));
  };
  const auto add = [&](const Tensor& a, const Tensor& b) {
    return graph.pointwise(a, b, node(Mode::ADD));
  };
  // By Horner's rule; null for a constant, whose value is 1.
  const auto polynomial = [&](const Tensor& at, const std::vector<float>& coefficients) {
    Tensor sum;
    for (auto c = coefficients.rbegin(); coefficients.size() > 1 && c != coefficients.rend(); ++c) {
      sum = sum == nullptr ? number(*c) : add(mul(at, sum), number(*c));
    }
    return sum;
  };
  const std::vector<float> p = logistic_polynomial(activation);
  std::vector<float> halves, derivative;  // P / 2, and the derivative of x P(x^2)
  for (size_t i = 0; i < p.size(); ++i) {
    halves.push_back(p[i] / 2);
    derivative.push_back(p[i] * static_cast<float>(2 * i + 1));
  }
  const Tensor half = number(0.5f), one = number(1.0f);
  // From |x| = 10 on the logistic function is 0 or 1; the powers of large numbers were infinite,
  // and the slope infinity times 0.
  const Tensor square =
      p.size() > 1 ? graph.pointwise(mul(x, x), number(100.0f), node(Mode::MIN)) : nullptr;
  const Tensor scaled = p.size() > 1 ? polynomial(square, halves) : half;
  // s(y) = (1 + tanh(y / 2)) / 2
  const Tensor tanh = graph.pointwise(mul(x, scaled), node(Mode::TANH_FWD));
  const Tensor logistic = add(mul(tanh, half), half);
  const Tensor value = mul(x, logistic);
  Tensor rest = mul(value, graph.pointwise(one, logistic, node(Mode::SUB)));
  if (p.size() > 1) rest = mul(rest, polynomial(square, derivative));
  return {value, add(rest, logistic)};
}

}  // namespace cudnn_ops
