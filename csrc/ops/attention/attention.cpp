#include "ops/attention/attention.h"

#include <ATen/Context.h>

namespace cudnn_ops {

bool is_deterministic(const AttentionOptions& options) {
  return options.deterministic.value_or(at::globalContext().deterministicAlgorithms());
}

const Operator<at::Tensor, RngState>& attention_rng_state_op() {
  static const Operator<at::Tensor, RngState> op("cudnn_ops::_attention_rng_state");
  return op;
}

}  // namespace cudnn_ops
