// The checks that all attention operators share. `op` begins the message: "cudnn_ops.sdpa: ".
#pragma once

#include "ops/attention/dense/sdpa.h"

namespace cudnn_ops {

// Whether CUDNN_OPS_CHECK asks for the checks that have to wait for the GPU.
bool checks_values();
// Whether what a tensor holds is checked: on a CPU always.
bool checks_values(const at::Tensor& tensor);

// Adds no guard for sizes that a compiler keeps symbolic beyond the fact that is checked.
inline bool holds(const c10::SymBool& condition) {
  return condition.expect_true(__FILE__, __LINE__);
}

// Whether it is so as far as a compiler knows: where only the data tell, no.
inline bool known(const c10::SymBool& condition) {
  return TORCH_GUARD_OR_FALSE(condition);
}

// Of query heads and those that they share; of none only none.
bool is_multiple(const c10::SymInt& heads, const c10::SymInt& of);
// Query, key and value as torch's function takes them: they fit each other, or broadcast.
void check_shapes(const Attention& args);
// `full`: what it has to broadcast to, [..., H, Sq, Skv].
void check_mask(const at::Tensor& mask, const at::Tensor& query, c10::SymIntArrayRef full);
// Dtypes and head sizes that no GPU takes, said before a graph is built.
void check_supported(const at::Tensor& tensor, const char* name, const char* op);
// A number for each head of the query, which are its dimension `head_dim`.
void check_per_head(const at::Tensor& tensor, const at::Tensor& query, const char* name,
                    const char* op, int64_t head_dim = 1);
void check_scalars(std::optional<double> scale, double dropout_p, double softcap,
                   c10::IntArrayRef window_size, const OptionalTensor& rng_state,
                   const at::Tensor& query, const char* op);
// Of packed sequences: [B + 1] whole numbers, and where checks_values says so what they are.
void check_offsets(const at::Tensor& offsets, const at::Tensor& packed, const c10::SymInt& longest,
                   const char* name, const char* longest_name, const char* op);

}  // namespace cudnn_ops
