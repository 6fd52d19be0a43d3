// A call on packed sequences as calls on some of them at a time.
#pragma once

#include "ops/attention/packed/varlen.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace cudnn_ops {

// Some of the sequences. Their offsets alone say which, for these lead into the whole tensors.
inline Varlen part_of(const Varlen& whole, int64_t start, int64_t count) {
  Varlen part = whole;
  part.cu_seqlens_q = whole.cu_seqlens_q.narrow(0, start, count + 1);
  part.cu_seqlens_k = whole.cu_seqlens_k.narrow(0, start, count + 1);
  if (whole.seqused_q) part.seqused_q = whole.seqused_q->narrow(0, start, count);
  if (whole.seqused_k) part.seqused_k = whole.seqused_k->narrow(0, start, count);
  return part;
}

// Calls `function` with at most so many sequences at a time, and with the number of the first.
template <class Function>
void for_sequences(const Varlen& args, int64_t most, const Function& function) {
  const int64_t sequences = args.cu_seqlens_q.size(0) - 1;
  if (sequences <= most) return function(args, 0);
  TORCH_CHECK_NOT_IMPLEMENTED(
      args.dropout_p == 0, "cudnn_ops.varlen_attention: with dropout cuDNN supports at most ", most,
      " sequences of this size, got ", sequences, "; call it for some of them at a time");
  for (int64_t start = 0; start < sequences; start += most) {
    function(part_of(args, start, std::min(most, sequences - start)), start);
  }
}

}  // namespace cudnn_ops
