// Activations and their slopes from one tanh, as nodes of a cuDNN graph: SiLU and both GELUs are
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

// Nodes of rank 3 that the activations are made of.
class LogisticNodes {
 public:
  using Tensor = std::shared_ptr<cudnn_frontend::graph::Tensor_attributes>;
  using Mode = cudnn_frontend::PointwiseMode_t;

  explicit LogisticNodes(graph::FrontendGraph& graph) : graph_(graph) {
  }

  Tensor number(float value) const {
    auto attributes = cudnn_frontend::graph::Tensor_attributes(value);
    return graph_.tensor(attributes.set_dim({1, 1, 1}).set_stride({1, 1, 1}));
  }
  Tensor of(Mode mode, const Tensor& a) const {
    return graph_.pointwise(a, cudnn_frontend::graph::Pointwise_attributes().set_mode(mode));
  }
  Tensor of(Mode mode, const Tensor& a, const Tensor& b) const {
    return graph_.pointwise(a, b, cudnn_frontend::graph::Pointwise_attributes().set_mode(mode));
  }
  Tensor mul(const Tensor& a, const Tensor& b) const {
    return of(Mode::MUL, a, b);
  }
  Tensor add(const Tensor& a, const Tensor& b) const {
    return of(Mode::ADD, a, b);
  }

  // By Horner's rule; of a constant: that.
  Tensor polynomial(const Tensor& at, const std::vector<float>& coefficients) const {
    Tensor sum;
    for (auto c = coefficients.rbegin(); c != coefficients.rend(); ++c) {
      sum = sum == nullptr ? number(*c) : add(mul(at, sum), number(*c));
    }
    return sum;
  }

  // x^2 for a polynomial. From |x| = 10 on the logistic function is 0 or 1; the powers of large
  // numbers were infinite, and the slope infinity times 0.
  Tensor square(const Tensor& x) const {
    return of(Mode::MIN, mul(x, x), number(100.0f));
  }

  // s(x P(x^2)), where s(y) = (1 + tanh(y / 2)) / 2.
  Tensor logistic(const Tensor& x, const Tensor& square, std::vector<float> p) const {
    for (float& each : p) each /= 2;
    const Tensor half = number(0.5f);
    return add(mul(of(Mode::TANH_FWD, mul(x, polynomial(square, p))), half), half);
  }

 private:
  graph::FrontendGraph& graph_;
};

// The exact GELU of `x`, of a rank of 3, where nothing needs the slope: within 2.6e-5 of the
// definition's, a tenth of what the tanh is wrong by, with three coefficients in place of five.
// They grow no more from |x| = 7 on, where the logistic function is 0 or 1 already.
inline LogisticNodes::Tensor exact_gelu(graph::FrontendGraph& graph,
                                        const LogisticNodes::Tensor& x) {
  const LogisticNodes nodes(graph);
  return nodes.mul(
      x, nodes.logistic(x, nodes.square(x), {1.59501577f, 7.40112922e-2f, -7.03033605e-4f}));
}

// The value and the slope at `x`, of a rank of 3.
inline std::pair<LogisticNodes::Tensor, LogisticNodes::Tensor> value_and_slope(
    graph::FrontendGraph& graph, const LogisticNodes::Tensor& x, Activation activation) {
  using Tensor = LogisticNodes::Tensor;
  const LogisticNodes nodes(graph);
  const std::vector<float> p = logistic_polynomial(activation);
  std::vector<float> derivative;  // of x P(x^2)
  for (size_t i = 0; i < p.size(); ++i) {
    derivative.push_back(p[i] * static_cast<float>(2 * i + 1));
  }
  const Tensor square = p.size() > 1 ? nodes.square(x) : nullptr;
  const Tensor logistic = nodes.logistic(x, square, p);
  const Tensor value = nodes.mul(x, logistic);
  Tensor rest = nodes.mul(value, nodes.of(LogisticNodes::Mode::SUB, nodes.number(1.0f), logistic));
  if (p.size() > 1) rest = nodes.mul(rest, nodes.polynomial(square, derivative));
  return {value, nodes.add(rest, logistic)};
}

}  // namespace cudnn_ops
