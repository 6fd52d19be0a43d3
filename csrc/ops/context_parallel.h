// Inside torch.distributed.tensor.experimental.context_parallel each rank holds a part of every
// sequence, and torch's own attention is replaced by one that passes keys from rank to rank. Ours
// is not, and would attend to the rank's own keys alone: it is refused.
//
// Ring attention computes its parts by the same operators, and says so for its thread.
//
// Any thread may call anything here at any time; torch's context holds for all of them.
#pragma once

#include <c10/util/Exception.h>

namespace cudnn_ops {

// Whether it is in force for what this thread calls.
bool is_context_parallel();
void set_context_parallel(bool active);
// Whether this thread's calls are of a part that is merged with the others; returns what held.
bool set_computes_parts(bool computes);

// `op` begins the message, as in sdpa_check.h.
inline void refuse_context_parallel(const char* op) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !is_context_parallel(), op,
      "inside torch.distributed.tensor.experimental.context_parallel each rank would attend to its "
      "own part of the sequence alone; use cudnn_ops.scaled_dot_product_attention there, which "
      "passes "
      "keys from rank to rank. "
      "(torch does not end that context where an exception leaves it.)");
}

}  // namespace cudnn_ops
