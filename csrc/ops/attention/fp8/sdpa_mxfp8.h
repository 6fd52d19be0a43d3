// Scaled dot-product attention over batched tensors of 8 bits with a scale for each 32 numbers
// (MXFP8): what its files share. See cudnn_ops/ops/mxfp8.py for the meaning of the arguments.
#pragma once

#include "ops/attention/dense/sdpa_plan_key.h"
#include "ops/attention/fp8/sdpa_mxfp8_params.h"

#include <string>

namespace cudnn_ops {

struct SdpaMxFp8 {
  Sdpa args;
  at::Tensor descale_query, descale_key, descale_value;  // E8M0, in the order of MxScales
  at::ScalarType out_dtype = at::kBFloat16;

  template <class Self>
  static auto fields(Self& self) {
    auto& args = self.args;
    return std::tie(args.query, args.key, args.value, self.descale_query, self.descale_key,
                    self.descale_value, self.out_dtype, args.is_causal, args.scale,
                    args.window_size, args.bottom_right);
  }
};

// The output, the log-sum-exp, and the largest magnitude of the output.
using SdpaMxFp8Results = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

void check_sdpa_mxfp8(const SdpaMxFp8& given);

// Why a call must not reach cuDNN; empty where cuDNN itself says.
std::string why_no_mxfp8(const Sdpa& args);

// For tensors as cuDNN is given them.
SdpaMxFp8Params sdpa_mxfp8_params(const Sdpa& args, const graph::TensorDesc& query,
                                  const graph::TensorDesc& key, const graph::TensorDesc& value,
                                  const graph::TensorDesc& out);

// Which plan a call would need: of tensors on the meta device too.
PlanAnswer sdpa_mxfp8_plan_key(const SdpaMxFp8& given);

}  // namespace cudnn_ops
