// What attention's plans bake in: their keys.
#pragma once

#include "graph/plan_key.h"
#include "graph/tensor_desc.h"

namespace cudnn_ops {

// How a plan knows where its sequences are and how long.
enum class Sequences : int64_t {
  kFull,     // each fills its part of a batched tensor
  kLengths,  // as kFull, but only so many rows of each count: int32 [B] on the device
  kRagged,   // they begin where the offsets say: int64 [B + 1] on the device, for every tensor
};

constexpr int64_t kUnbounded = -1;

// What stands between the products of attention. The scale and the cap are passed at run time.
//
// A query i of a sequence attends to the keys j with  i - left <= j - shift <= i + right,  where
// shift is 0, or with `bottom_right` the length of the keys less that of the queries.
struct SdpaMask {
  int64_t left = kUnbounded;
  int64_t right = kUnbounded;
  bool bottom_right = false;
  bool has_softcap = false;
  bool has_alibi = false;
  bool has_sinks = false;
  Sequences sequences = Sequences::kFull;
  graph::TensorDesc bias;  // rank 0: there is none
  int64_t dropout_p = 0;   // the bits of a double
  CUDNN_OPS_FIELDS(left, right, bottom_right, has_softcap, has_alibi, has_sinks, sequences, bias,
                   dropout_p)
};

// The log-sum-exp is [B, Hq, Sq], dense; or packed, [Hq, lse_stride] and its offsets: a token's
// neighbours in memory are tokens, for cuDNN reads and writes it a row of threads at a time.
struct SdpaForwardParams {
  static constexpr const char* kName = "sdpa";
  graph::TensorDesc query, key, value, out;
  SdpaMask mask;
  bool with_lse = false;
  int64_t lse_stride = 0;  // 0: dense
  CUDNN_OPS_FIELDS(query, key, value, out, mask, with_lse, lse_stride)
};

struct SdpaBackwardParams {
  static constexpr const char* kName = "sdpa_backward";
  graph::TensorDesc query, key, value, out, grad_out, grad_query, grad_key, grad_value;
  graph::TensorDesc grad_bias;  // rank 0: not asked for
  SdpaMask mask;
  int64_t lse_stride = 0;  // 0: dense
  bool is_deterministic = false;
  CUDNN_OPS_FIELDS(query, key, value, out, grad_out, grad_query, grad_key, grad_value, grad_bias,
                   mask, lse_stride, is_deterministic)
};

}  // namespace cudnn_ops
