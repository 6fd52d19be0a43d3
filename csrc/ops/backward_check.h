// What operators and their backwards check alike. A backward is an operator of its own, which
// anyone can call with anything.
#pragma once

#include <ATen/core/Tensor.h>

namespace cudnn_ops {

// The dtypes that norms, activations, rotary embedding and convolutions have kernels for; float64
// on CPUs alone. torch counts those of 8 bits among the floating-point ones.
inline bool is_computed_in(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat ||
         dtype == at::kDouble;
}

// The dtypes of 8 bits that cuDNN computes attention in.
inline bool is_fp8(at::ScalarType dtype) {
  return dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2;
}

// Whether a backward was given a tensor that is like another of the forward, in all but strides.
inline void check_like(const at::Tensor& tensor, const at::Tensor& like, const char* op,
                       const char* name) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == like.scalar_type(), op, " backward: ", name, " must be ",
                   like.scalar_type(), "; got ", tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.sym_sizes() == like.sym_sizes() && tensor.device() == like.device(), op,
                    " backward: ", name, " must be ", like.sym_sizes(), " on ", like.device(),
                    "; got ", tensor.sym_sizes(), " on ", tensor.device());
}

}  // namespace cudnn_ops
