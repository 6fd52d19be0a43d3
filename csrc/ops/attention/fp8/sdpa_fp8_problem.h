// From the arguments of a call to the problem that cuDNN is given: nothing here needs a GPU.
#pragma once

#include "ops/attention/band.h"
#include "ops/attention/fp8/sdpa_fp8.h"
#include "ops/attention/fp8/sdpa_fp8_params.h"

namespace cudnn_ops {

// What of a call is computed at all. Every query of it sees a key unless the device alone knows:
// cuDNN's kernel for Hopper does not end where a tile of queries has none.
struct SdpaFp8Part {
  Sdpa args;
  Band band;
  int64_t row = 0, rows = 0;        // of the call's queries
  int64_t column = 0, columns = 0;  // of its keys

  explicit SdpaFp8Part(const Sdpa& whole);
  bool is_empty() const {
    return rows == 0 || columns == 0;
  }
};

// cuDNN has no kernel for a single query: it gets the same one twice.
at::Tensor two_queries(const at::Tensor& query);

// What a plan bakes in of the options.
SdpaMask fp8_mask(const SdpaFp8Part& part, bool backward);

// Hopper's kernel writes FP8 alone.
at::ScalarType written_dtype(at::ScalarType out_dtype, int64_t sm_major);

SdpaFp8Params sdpa_fp8_params(const SdpaFp8Part& part, const graph::TensorDesc& query,
                              const graph::TensorDesc& key, const graph::TensorDesc& value,
                              const graph::TensorDesc& out, bool with_lse);

}  // namespace cudnn_ops
