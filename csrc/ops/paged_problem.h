// From the arguments of a call to the plan that it needs: nothing here needs a GPU.
#pragma once

#include "paged.h"
#include "paged_params.h"

namespace cudnn_ops {

// The head stride of a packed log-sum-exp, [H, stride]: a power of 2, so that few plans serve all
// numbers of tokens.
int64_t packed_lse_stride(int64_t tokens);

// One plan serves every batch up to the declared one, every width of the table up to the declared
// one, and if the queries are packed every number of them up to the declared one.
struct PagedProblem {
  PagedParams params;
  // A single query a sequence has no sinks in cuDNN: they are applied to its result.
  bool has_sinks_afterwards;

  PagedProblem(const Paged& args, bool with_lse);
};

}  // namespace cudnn_ops
