// Rounding to numbers of 8 bits and back (fp8.cu).
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

namespace cudnn_ops {

// All of the following run on the current device and stream, and none of the tensors is empty.

// Rounds `input` times its scale to `out`, which at::empty_like made. `dim`: of
// which each index has a scale of its own, or none. Without `scale` they follow from the largest
// magnitudes, float32 [groups] `amax`, which are written in either case, as `descale` is; with
// `is_power` they are powers of two then.
void round_to_fp8(const at::Tensor& input, const std::optional<at::Tensor>& scale,
                  std::optional<int64_t> dim, bool is_power, const at::Tensor& out,
                  const at::Tensor& descale, const at::Tensor& amax);

// `input` of 8 bits times `descale`, float32 [groups], to `out`, likewise; and `amax`, if defined,
// times the only one.
void widen_fp8(const at::Tensor& input, const at::Tensor& descale, std::optional<int64_t> dim,
               const at::Tensor& out, const at::Tensor& amax = {});

// What a plan of FP8 attention reads beside its operands.
struct Fp8Numbers {
  // Descales of query, key, value and probabilities, the scales of those and of the output, and
  // the output's descale: each a float32 at a multiple of 16 bytes.
  std::array<at::Tensor, 7> numbers;
  at::Tensor amax, amax_out;       // [1], zero
  at::Tensor lengths, lengths_kv;  // int32 [B]: at most the sizes, no key without another
};

struct Fp8NumbersGiven {
  at::Tensor descale_query, descale_key;
  at::Tensor descale_value;  // undefined: 1
  std::optional<at::Tensor> scale_out;
  bool is_scaled;  // whether the output is rounded to 8 bits
  float scale;     // of the probabilities
  // int32, of sequences in a batch of so many queries and keys; undefined for all of them.
  at::Tensor lengths, lengths_kv;
  int64_t batch, queries, keys;
  // Whether the output is widened behind the plan: until then it is in the value's units, for cuDNN
  // multiplies the descales first, and products of small ones would be 0. So is amax_out.
  bool is_widened = false;
};
Fp8Numbers make_fp8_numbers(const Fp8NumbersGiven& given);

}  // namespace cudnn_ops
