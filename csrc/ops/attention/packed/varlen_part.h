// A call on packed sequences as calls on some of them at a time.
#pragma once

#include "ops/attention/packed/varlen.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace cudnn_ops {

// Some of the sequences. Their offsets alone say which, for these lead into the whole tensors.
// `whole` must stay alive.
class VarlenPart {
 public:
  VarlenPart(const Varlen& whole, int64_t start, int64_t count)
      : whole_(whole),
        cu_seqlens_q_(whole.cu_seqlens_q.narrow(0, start, count + 1)),
        cu_seqlens_k_(whole.cu_seqlens_k.narrow(0, start, count + 1)) {
    if (whole.seqused_q) seqused_q_ = whole.seqused_q->narrow(0, start, count);
    if (whole.seqused_k) seqused_k_ = whole.seqused_k->narrow(0, start, count);
  }

  // Valid as long as this object.
  Varlen varlen() const {
    return {whole_.query,        whole_.key,           whole_.value,        cu_seqlens_q_,
            cu_seqlens_k_,       whole_.max_seqlen_q,  whole_.max_seqlen_k, whole_.dropout_p,
            whole_.scale,        whole_.is_causal,     whole_.window_size,  whole_.softcap,
            whole_.alibi_slopes, whole_.sinks,         seqused_q_,          seqused_k_,
            whole_.bottom_right, whole_.deterministic, whole_.rng_state};
  }

 private:
  const Varlen& whole_;
  at::Tensor cu_seqlens_q_, cu_seqlens_k_;
  OptionalTensor seqused_q_, seqused_k_;
};

// Calls `function` with at most so many sequences at a time, and with the number of the first.
template <class Function>
void for_sequences(const Varlen& args, int64_t most, const Function& function) {
  const int64_t sequences = args.cu_seqlens_q.size(0) - 1;
  if (sequences <= most) return function(args, 0);
  TORCH_CHECK_NOT_IMPLEMENTED(
      args.dropout_p == 0, "cudnn_ops.varlen_attention: with dropout cuDNN takes at most ", most,
      " sequences of this size, got ", sequences, "; call it for some of them at a time");
  for (int64_t start = 0; start < sequences; start += most) {
    const VarlenPart part(args, start, std::min(most, sequences - start));
    function(part.varlen(), start);
  }
}

}  // namespace cudnn_ops
