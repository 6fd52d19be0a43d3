// What attention's CUDA kernels share: the tensors of a call as plans read and write them.
#pragma once

#include "ops/attention/attention.h"
#include "ops/attention/fp8/sdpa_fp8_params.h"
#include "ops/attention/paged/paged_params.h"
#include "ops/attention/attention_params.h"

#include "graph/cuda_call.h"

#include <c10/util/SmallVector.h>

#include <array>
#include <limits>

namespace cudnn_ops {

// An uninitialized dense tensor whose dimensions lie in memory in the order of those of `like`.
at::Tensor empty_like_order(c10::IntArrayRef sizes, const at::Tensor& like);

// The tensor itself when cuDNN can address it, else a dense copy in the memory order of `like`.
at::Tensor addressable(const at::Tensor& tensor, const at::Tensor& like,
                       int64_t max_extent = std::numeric_limits<int64_t>::max());

// cuDNN subtracts the maximum of the scores before it scales them, so a scale that is not positive
// overflows or gives NaN. Such a scale is folded into the query: scale * q == scale' * (sign * q)
// with scale' > 0 and sign -1 or 0, both of which are exact.
struct Scale {
  float value;
  double query_sign;  // 1: leave the query alone

  Scale(std::optional<double> scale, const at::Tensor& query);
  at::Tensor applied_to(const at::Tensor& query) const;
};

// What the attention to no key gives: zeros, and the log-sum-exp [..., H, rows] of the sink alone,
// minus infinity where there is none. `lse` may be undefined.
void fill_with_nothing(const at::Tensor& out, const at::Tensor& lse, const OptionalTensor& sinks);

// What a plan reads beside query, key and value. Undefined: there is none.
struct MaskTensors {
  at::Tensor bias, alibi_slopes, sinks, rng_state;
  at::Tensor lengths, lengths_kv;  // int32 [B] on the device

  // What follows from the options alone. A dropout over so many queries and keys draws its numbers
  // here, unless the call has them.
  static MaskTensors of(const AttentionOptions& options, const at::Tensor& query,
                        const c10::SymInt& length, const c10::SymInt& length_kv, bool with_sinks);
};

// What a plan reads, `scale` and `softcap` from the host, and writes. Undefined where it does not.
struct SdpaForwardTensors {
  at::Tensor query, key, value;
  MaskTensors mask;
  float scale, softcap;
  at::Tensor out, lse;
};

// Of FP8 attention: beside that the descales of query, key, value and probabilities, the scales of
// those and of the output, each at a multiple of 16 bytes; and the largest magnitudes of both.
struct SdpaFp8Tensors : SdpaForwardTensors {
  std::array<at::Tensor, 6> numbers;
  std::array<at::Tensor, 2> amax;
};

struct SdpaBackwardTensors {
  at::Tensor query, key, value, out, lse, grad_out;
  MaskTensors mask;
  float scale, softcap;
  at::Tensor grad_query, grad_key, grad_value, grad_bias;
};

// The addresses in the order of the plan (attention_graph.h), without the table of a ragged one.
struct SdpaPointers {
  c10::SmallVector<void*, 40> all;
  c10::SmallVector<graph::Call::Written, 4> written;

  SdpaPointers(const SdpaForwardParams& params, SdpaForwardTensors& tensors);
  SdpaPointers(const SdpaBackwardParams& params, SdpaBackwardTensors& tensors);
  // Of a ragged plan without what add_numbers() adds, which comes behind the table.
  SdpaPointers(const SdpaFp8Params& params, SdpaFp8Tensors& tensors);
  // Without the page table, which comes last, after the offsets and lengths of a ragged one.
  SdpaPointers(const PagedParams& params, SdpaForwardTensors& tensors);

  void add_numbers(const SdpaFp8Tensors& tensors);

 private:
  template <class Params, class Tensors>
  void add_inputs(const Params& params, Tensors& tensors);
  template <class Params>
  void add_forward(const Params& params, SdpaForwardTensors& tensors);
  void write(const at::Tensor& tensor);
};

// How an operator's calls are told from others in messages.
struct CallName {
  const char* op;      // "cudnn_ops.sdpa"
  const char* advice;  // what to do where cuDNN refuses
};

inline graph::Call call_of(const CallName& name, const SdpaPointers& pointers) {
  return {name.op, name.advice, pointers.all, pointers.written};
}

}  // namespace cudnn_ops
