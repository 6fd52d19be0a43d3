// From the arguments of a call to the problem that cuDNN is given: nothing here needs a GPU.
#pragma once

#include "ops/attention/fp8/sdpa_fp8_params.h"
#include "ops/attention/fp8/varlen_fp8.h"

namespace cudnn_ops {

// For tensors that are readable (packed/varlen_problem.h). `written`: the type that cuDNN writes.
SdpaFp8Params varlen_fp8_params(const Varlen& args, const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, at::ScalarType written);

}  // namespace cudnn_ops
