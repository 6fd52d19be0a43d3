// Attention over packed sequences of 8 bits: what its files share. See cudnn_ops/ops/varlen_fp8.py
// for the meaning of the arguments.
#pragma once

#include "ops/attention/packed/varlen.h"

#include <string>
#include <vector>

namespace cudnn_ops {

struct VarlenFp8 {
  Varlen args;
  at::Tensor descale_query, descale_key, descale_value;  // one float32 on the device
  at::ScalarType out_dtype = at::kBFloat16;
  OptionalTensor scale_out;  // likewise

  template <class Self>
  static auto fields(Self& self) {
    auto& args = self.args;
    return std::tie(args.query, args.key, args.value, args.cu_seqlens_q, args.cu_seqlens_k,
                    args.max_seqlen_q, args.max_seqlen_k, self.descale_query, self.descale_key,
                    self.descale_value, self.out_dtype, self.scale_out, args.scale, args.is_causal,
                    args.window_size, args.seqused_q, args.seqused_k, args.bottom_right);
  }
};

// The output, and the largest magnitudes of the probabilities and of the output.
using VarlenFp8Results = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

void check_varlen_fp8(const VarlenFp8& given);

// Which plan a call would need: for what asks, warms up or tunes.
struct VarlenFp8PlanRequest {
  VarlenFp8 args;
  int64_t sm_major = 0;
  CUDNN_OPS_FIELDS(args, sm_major)
};
std::vector<int64_t> varlen_fp8_plan_key(const VarlenFp8PlanRequest& request);

}  // namespace cudnn_ops
