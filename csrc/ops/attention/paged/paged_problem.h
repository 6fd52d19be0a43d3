// From the arguments of a call to the plan that it needs: nothing here needs a GPU.
#pragma once

#include "ops/attention/paged/paged.h"
#include "ops/attention/paged/paged_params.h"

namespace cudnn_ops {

// The head stride of a packed log-sum-exp, [H, stride]: a power of 2, so that few plans serve all
// numbers of tokens.
int64_t packed_lse_stride(int64_t tokens);

// Packed queries of which each sequence has one are a batch like any other, and faster as such.
bool is_packed_batch(const Paged& args);
Paged batch_of(const Paged& packed);

// One plan serves every batch up to the declared one, every width of the table up to the declared
// one, and if the queries are packed every number of them up to the declared one.
struct PagedProblem {
  PagedParams params;
  // How many queries of a sequence are folded into heads, [heads_kv, queries, group]: its decoding
  // engine, which knows a single query, reads the keys once for all of them, and the others once
  // for each head. They see all keys that the engine is shown, which are those of the first query.
  int64_t queries = 1;
  int64_t hidden = 0;              // keys at the end that it is not shown
  int64_t most_keys = kUnbounded;  // how many it is shown at most
  // Whether they, and the sinks, which it does not know either, are added to its result.
  bool is_merged = false;

  PagedProblem(const Paged& args, bool with_lse);

  bool is_decoding() const {
    return cudnn_ops::is_decoding(params);
  }
};

}  // namespace cudnn_ops
