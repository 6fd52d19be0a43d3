// The checks that all attention operators share. `op` begins the message: "cudnn_ops.sdpa: ".
#pragma once

#include "ops/attention/attention.h"
#include "ops/check_values.h"

namespace cudnn_ops {

// Adds no guard for sizes that a compiler keeps symbolic beyond the fact that is checked.
inline bool holds(const c10::SymBool& condition) {
  return condition.expect_true(__FILE__, __LINE__);
}

// Whether it is so as far as a compiler knows: where only the data tell, no.
inline bool known(const c10::SymBool& condition) {
  return TORCH_GUARD_OR_FALSE(condition);
}

// Whether query heads can share that many heads of the keys; none share none.
bool is_multiple(const c10::SymInt& heads, const c10::SymInt& of);
// Refuses dtypes and head sizes that no GPU supports, before a graph is built.
void check_supported(const at::Tensor& tensor, const char* name, const char* op);
void check_options(const AttentionOptions& options, const at::Tensor& query, const char* op);
// alibi_slopes and sinks: a number for each head of the query, which are its dimension `head_dim`.
void check_per_head(const AttentionOptions& options, const at::Tensor& query, const char* op,
                    int64_t head_dim = 1);
// Lengths of the sequences of a batch, [B] integers of at most `length`; their values where
// checks_values says so.
void check_seq_lens(const OptionalTensor& lengths, const at::Tensor& query,
                    const c10::SymInt& length, const char* name, const char* op);
// Offsets of packed sequences, [B + 1] integers; their values where checks_values says so.
void check_offsets(const at::Tensor& offsets, const at::Tensor& packed, const c10::SymInt& longest,
                   const char* name, const char* longest_name, const char* op);

}  // namespace cudnn_ops
