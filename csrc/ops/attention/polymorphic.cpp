#include "ops/attention/polymorphic.h"

#include "ops/attention/attention.h"

#include <algorithm>
#include <type_traits>

namespace cudnn_ops {
namespace {

using graph::TensorDesc;

int64_t floor_power_of_2(int64_t n) {
  int64_t power = 1;
  while (power * 2 <= n) power *= 2;
  return power;
}

int64_t round_up(int64_t n, int64_t step) {
  return (n + step - 1) / step * step;
}

void declare(TensorDesc& tensor, int64_t batch, int64_t length) {
  const int64_t heads = tensor.sizes[1], size = tensor.sizes[3];
  int64_t head = size, token = heads * size;
  if (is_token_major(tensor)) {
    // A stride along a dimension of size 1 means nothing.
    if (heads > 1) head = tensor.strides[1];
    token = tensor.sizes[2] > 1 ? tensor.strides[2] : heads * head;
  }
  tensor.sizes = {batch, heads, length, size};
  tensor.strides = {length * token, head, token, 1};
}

template <class Params>
void declare_all(Params& params, int64_t batch, int64_t length, int64_t length_kv) {
  declare(params.query, batch, length);
  declare(params.key, batch, length_kv);
  declare(params.value, batch, length_kv);
  declare(params.out, batch, length);
  if constexpr (std::is_same_v<Params, SdpaBackwardParams>) {
    declare(params.grad_out, batch, length);
    declare(params.grad_query, batch, length);
    declare(params.grad_key, batch, length_kv);
    declare(params.grad_value, batch, length_kv);
  }
  params.mask.sequences = Sequences::kRagged;
}

template <class Params>
std::optional<Params> polymorphic_of(Params params, const Band& band) {
  if (params.query.sizes[0] > kMaxBackwardRows) return std::nullopt;
  if (params.mask.bias.rank != 0 || params.mask.dropout_p != 0) return std::nullopt;
  // cuDNN 9.19 reads lengths wrongly where slopes are measured from them.
  if (params.mask.has_alibi && band.bottom_right) return std::nullopt;
  params.mask.left = band.left;
  params.mask.right = band.right;
  params.mask.bottom_right = band.bottom_right;
  declare_all(params, declared_batch(params.query.sizes[0]), declared_length(params.query.sizes[2]),
              declared_length(params.key.sizes[2]));
  const auto fits = [](const auto& field) {
    if constexpr (std::is_same_v<std::decay_t<decltype(field)>, TensorDesc>) {
      return field.sizes[0] * field.strides[0] <= kMaxBackwardElements;
    }
    return true;
  };
  const bool all_fit = std::apply([&](const auto&... field) { return (fits(field) && ...); },
                                  Params::fields(params));
  return all_fit ? std::optional<Params>(params) : std::nullopt;
}

}  // namespace

// A declared length costs time only where it is many times the real one, and memory in the
// backward, whose workspace is 8 bytes for each declared element of the query. So: few sizes
// where memory is small (1024, 2048, 4096), then four an octave.
int64_t declared_length(int64_t length) {
  constexpr int64_t kSmallest = 1024, kFine = 4096;
  if (length <= kSmallest) return kSmallest;
  const int64_t below = floor_power_of_2(length - 1);
  return length <= kFine ? 2 * below : round_up(length, below / 4);
}

// Sequences of length 0 fill up the batch; they cost launched blocks that end at once, and
// workspace as above. Two sizes an octave: 1, 2, 3, 4, 6, 8, 12, ...
int64_t declared_batch(int64_t batch) {
  if (batch <= 2) return batch;
  const int64_t step = std::max<int64_t>(floor_power_of_2(batch - 1) / 2, 1);
  return std::min(round_up(batch, step), kMaxBackwardRows);
}

bool is_token_major(const TensorDesc& tensor) {
  return tensor.sizes[1] == 1 || tensor.sizes[2] == 1 || tensor.strides[1] < tensor.strides[2];
}

std::optional<SdpaForwardParams> polymorphic(const SdpaForwardParams& exact, const Band& band) {
  return polymorphic_of(exact, band);
}

std::optional<SdpaBackwardParams> polymorphic(const SdpaBackwardParams& exact, const Band& band) {
  return polymorphic_of(exact, band);
}

SdpaForwardParams family_of(SdpaForwardParams polymorphic) {
  declare_all(polymorphic, 0, 0, 0);
  return polymorphic;
}

SdpaBackwardParams family_of(SdpaBackwardParams polymorphic) {
  declare_all(polymorphic, 0, 0, 0);
  return polymorphic;
}

}  // namespace cudnn_ops
