// A matrix product with its epilogue by cuBLASLt: the library that torch has loaded, with torch's
// handle and settings. It has kernels for any number of rows; nothing is built.
#pragma once

#include "ops/activation.h"

#include <ATen/core/Tensor.h>

#include <optional>

namespace cudnn_ops {

// out = act(left @ right + bias + added); or, of a gradient, (left @ right) * gelu_tanh'(slope_of).
struct LtProduct {
  at::Tensor left, right;             // [m, k] and [k, n], with any strides
  at::Tensor out;                     // [m, n], contiguous, as all that follow with its columns
  std::optional<at::Tensor> bias{};   // [n]
  std::optional<at::Tensor> added{};  // [m, n]
  Activation activation = Activation::kNone;
  at::Tensor before{};                   // written where it is defined: what GELU is of
  std::optional<at::Tensor> slope_of{};  // [m, n]
  at::Tensor column_sums{};              // [n], written where it is defined: of the gradient
  at::Tensor row_sums{};                 // [m], written where it is defined: of `left`
};

// Whether cuBLASLt ends a product with the activation.
bool has_lt_epilogue(at::ScalarType dtype, Activation activation);

// On the current device and stream. False, with nothing done, where cuBLASLt has no kernel for it.
// Any thread may call this.
bool run_lt(const LtProduct& product);

}  // namespace cudnn_ops
