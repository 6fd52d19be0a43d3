// Linear layers with their epilogue, act(input @ weight.T + bias) + residual, and two of them
// around an activation: what their files share. See cudnn_ops/ops/linear.py for the meaning of the
// arguments.
#pragma once

#include "ops/activation.h"
#include "ops/operator.h"

#include <ATen/core/DimVector.h>

#include <array>

namespace cudnn_ops {

// The arguments of a call.
struct Linear {
  at::Tensor input, weight;
  OptionalTensor bias, residual;
  int64_t activation = 0;  // an Activation
  CUDNN_OPS_FIELDS(input, weight, bias, residual, activation)
  Activation kind() const {
    return activation_at(activation);
  }
};

// cudnn_ops::_linear.
struct LinearForward {
  Linear linear;
  bool with_before = false;
  CUDNN_OPS_FIELDS(linear, with_before)
};

// What the backward reads of the forward.
struct LinearSaved {
  at::Tensor input, weight;
  OptionalTensor saved;  // the activation's input, or its output: as needs_before() says
  int64_t activation = 0;
  CUDNN_OPS_FIELDS(input, weight, saved, activation)
  // The forward, as far as it is known.
  Linear linear() const {
    return {input, weight, /*bias=*/{}, /*residual=*/{}, activation};
  }
};

// cudnn_ops::_linear_backward_check.
struct LinearBackward {
  at::Tensor grad_out;
  LinearSaved forward;
  CUDNN_OPS_FIELDS(grad_out, forward)
};

// cudnn_ops::_linear_backward.
struct LinearMaskedBackward {
  LinearBackward backward;
  std::array<bool, 3> output_mask{};
  CUDNN_OPS_FIELDS(backward, output_mask)
};

// The output, and the activation's input, [0] where nobody asks for it.
using LinearResults = std::tuple<at::Tensor, at::Tensor>;
// Of input, weight and bias; [0] where nobody asks for it. The residual's is the output's.
using LinearGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Two layers with an activation between them. `gated`: the first gives a gate and what it is
// multiplied with, one behind the other: act(gate) * up.
struct Mlp {
  at::Tensor input, weight1;
  OptionalTensor bias1;
  at::Tensor weight2;
  OptionalTensor bias2;
  int64_t activation = 0;  // an Activation
  bool gated = false;
  CUDNN_OPS_FIELDS(input, weight1, bias1, weight2, bias2, activation, gated)
  Activation kind() const {
    return activation_at(activation);
  }
};

// What a pair of layers keeps for its backward. With kInput: the hidden layer, and what the
// activation is of where needs_before() says so. With kSlope: in that one's place the activation's
// slope, with which the backward's product can multiply in its epilogue; a gated activation, which
// has two, keeps what it is of.
enum class Keep : int64_t { kNothing, kInput, kSlope };

// cudnn_ops::_mlp.
struct MlpForward {
  Mlp mlp;
  int64_t keep = 0;  // a Keep
  CUDNN_OPS_FIELDS(mlp, keep)
};

// What the backward reads of the forward.
struct MlpSaved {
  at::Tensor input, weight1, weight2, hidden;
  OptionalTensor before;   // where needs_before() says so; or the slope
  int64_t activation = 0;  // kSlope where that was kept
  bool gated = false;
  CUDNN_OPS_FIELDS(input, weight1, weight2, hidden, before, activation, gated)
  Activation slope() const {
    return slope_at(activation);
  }
  // The forward, as far as it is known.
  Mlp mlp() const {
    const auto kind = slope() == Activation::kSlope ? Activation::kNone : slope();
    return {input, weight1, /*bias1=*/{}, weight2, /*bias2=*/{}, static_cast<int64_t>(kind), gated};
  }
};

// cudnn_ops::_mlp_backward_check.
struct MlpBackward {
  at::Tensor grad_out;
  MlpSaved forward;
  CUDNN_OPS_FIELDS(grad_out, forward)
};

// cudnn_ops::_mlp_backward.
struct MlpMaskedBackward {
  MlpBackward backward;
  std::array<bool, 5> output_mask{};
  CUDNN_OPS_FIELDS(backward, output_mask)
};

// The output; what the second layer is of, and what the activation is of: [0] where nobody asks.
using MlpResults = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
// Of input, weight1, bias1, weight2 and bias2; [0] where nobody asks for it.
using MlpGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// The tensor as [rows, columns], copied only if it cannot be seen as that; what is not there stays
// so.
at::Tensor as_matrix(const at::Tensor& tensor);
OptionalTensor as_matrix(const OptionalTensor& tensor);

// Whether the derivative is computed from the activation's input. That of ReLU is from its output,
// unless a residual is added to that. cuBLASLt could write a mask of bits instead; but the output
// is there anyway, as the next layer's input, and whether that epilogue runs is measured, where
// what is kept has to follow from the call alone.
inline bool needs_before(Activation activation, bool has_residual) {
  return activation != Activation::kNone && (activation != Activation::kRelu || has_residual);
}
inline bool needs_before(const Mlp& args) {
  return args.gated || needs_before(args.kind(), /*has_residual=*/false);
}
// ValueError where there is no such number.
Keep keep_at(int64_t number);

// The public operators.
at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                  std::string_view activation, const OptionalTensor& residual);
at::Tensor mlp(const at::Tensor& x, const at::Tensor& w1, const OptionalTensor& b1,
               const at::Tensor& w2, const OptionalTensor& b2, std::string_view activation,
               bool gated);

void check_linear(const Linear& args);
void check_linear_backward(const LinearBackward& args);
void check_mlp(const Mlp& args);
void check_mlp_forward(const MlpForward& args);
void check_mlp_backward(const MlpBackward& args);

// The input's sizes with another last one.
at::SymDimVector with_columns(const at::Tensor& input, const c10::SymInt& columns);

const Operator<LinearResults, LinearForward>& linear_op();
const Operator<MlpResults, MlpForward>& mlp_op();

}  // namespace cudnn_ops
