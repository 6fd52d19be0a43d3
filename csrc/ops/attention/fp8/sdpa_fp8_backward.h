// The gradients of attention over batched tensors of 8 bits: what its files share. See
// cudnn_ops/ops/sdpa_fp8_backward.py for the meaning of the arguments and the formulas.
#pragma once

#include "ops/attention/dense/sdpa_plan_key.h"
#include "ops/attention/fp8/sdpa_fp8.h"

#include <string>

namespace cudnn_ops {

struct SdpaFp8Backward {
  Sdpa args;
  at::Tensor grad_out, out, lse;
  // One float32 on the device each.
  at::Tensor descale_query, descale_key, descale_value, descale_out, descale_grad_out,
      scale_grad_scores;
  at::ScalarType grad_dtype = at::kBFloat16;

  template <class Self>
  static auto fields(Self& self) {
    auto& args = self.args;
    return std::tie(self.grad_out, args.query, args.key, args.value, self.out, self.lse,
                    self.descale_query, self.descale_key, self.descale_value, self.descale_out,
                    self.descale_grad_out, self.scale_grad_scores, self.grad_dtype, args.is_causal,
                    args.scale, args.window_size, args.bottom_right, args.seq_lens_q,
                    args.seq_lens_kv);
  }
};

// The gradients of query, key and value, and the largest magnitude of the scores'.
using SdpaFp8Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

void check_sdpa_fp8_backward(const SdpaFp8Backward& given);

// Why a GPU of this compute capability has no such gradients; empty where cuDNN says.
std::string why_no_fp8_backward(int64_t sm_major);

// Which plan a call would need, as SdpaFp8PlanRequest.
struct SdpaFp8BackwardPlanRequest {
  SdpaFp8Backward args;
  int64_t sm_major = 0;
  CUDNN_OPS_FIELDS(args, sm_major)
};
PlanAnswer sdpa_fp8_backward_plan_key(const SdpaFp8BackwardPlanRequest& request);

}  // namespace cudnn_ops
