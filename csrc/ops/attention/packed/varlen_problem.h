// From the arguments of a call on packed sequences to the plans that it needs: nothing here needs a
// GPU.
#pragma once

#include "ops/attention/attention_params.h"
#include "ops/attention/packed/varlen.h"

namespace cudnn_ops {

// What is declared, the same for a call's forward and backward: their random numbers agree only so.
struct Declared {
  int64_t sequences, length, length_kv;

  explicit Declared(const Varlen& args);
};

// Whether queries and keys are the same tokens, so that each finds itself and nothing is unwritten.
bool are_same_tokens(const Varlen& args);

// A tensor that cuDNN can address: the one given, or a dense copy.
at::Tensor readable(const at::Tensor& packed);

// The stride of the packed log-sum-exp that a plan reads or writes, [H, lse_stride]: a power of 2,
// so that few plans serve all numbers of tokens. 0 on compute capability 8.x and 12.x, whose
// backward wants [sequences, H, length].
int64_t lse_stride(const Varlen& args, int64_t sm_major);

// The parameters of the plans, for tensors that are readable.
SdpaForwardParams varlen_params(const Varlen& args, const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, bool with_lse, int64_t stride_of_lse);
SdpaBackwardParams varlen_backward_params(const Varlen& args, const at::Tensor& query,
                                          const at::Tensor& key, const at::Tensor& value,
                                          const at::Tensor& out, const at::Tensor& grad_out,
                                          int64_t stride_of_lse);

}  // namespace cudnn_ops
