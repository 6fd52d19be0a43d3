// What a plan of MXFP8 attention bakes in.
#pragma once

#include "ops/attention/attention_params.h"

namespace cudnn_ops {

// With the log-sum-exp. The sizes of the scales follow from those of their tensors.
struct SdpaMxFp8Params : SdpaForwardParams {
  static constexpr const char* kName = "sdpa_mxfp8";
  SdpaMxFp8Params() {
    with_lse = true;
  }
  CUDNN_OPS_FIELDS(query, key, value, out, mask)
};

// One scale for each 32 elements of a tensor [B, H, S, D]: along the rows, which products of query
// and key add up, or along the columns, which products with the value do. Both are matrices of
// [B, H] whose rows are padded to 128 and whose columns to 4, and lie in memory in tiles of
// 128 x 4: cuDNN's F8_128x4.
struct MxScales {
  int64_t batch, heads, rows, columns;
  bool is_transposed;  // as cuDNN counts its dimensions: [B, H, columns, rows]

  static constexpr int64_t kBlock = 32;
  static int64_t padded(int64_t size, int64_t unit) {
    return (size + unit - 1) / unit * unit;
  }
  static MxScales of_rows(const graph::TensorDesc& tensor) {
    const auto& sizes = tensor.sizes;
    return {sizes[0], sizes[1], padded(sizes[2], 128), padded(padded(sizes[3], kBlock) / kBlock, 4),
            false};
  }
  static MxScales of_columns(const graph::TensorDesc& tensor) {
    const auto& sizes = tensor.sizes;
    return {sizes[0], sizes[1], padded(sizes[3], 128), padded(padded(sizes[2], kBlock) / kBlock, 4),
            true};
  }
  graph::TensorDesc desc() const {
    const int64_t second = is_transposed ? columns : rows, last = is_transposed ? rows : columns;
    return {c10::ScalarType::Float8_e8m0fnu,
            {batch, heads, second, last},
            {heads * rows * columns, rows * columns, last, 1}};
  }
};

}  // namespace cudnn_ops
