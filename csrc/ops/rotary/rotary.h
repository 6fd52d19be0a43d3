// Rotary position embedding: what its files share. See cudnn_ops/ops/rotary.py for the formula.
#pragma once

#include "ops/operator.h"

#include <tuple>

namespace cudnn_ops {

using RotaryNumbers = c10::SmallVector<int64_t, 8>;

// Whether pairs are neighbours, how much of a head turns (0: all of it, by a factor for each
// number), and the pairs of each section, none of which stands for one section. Schemas have one
// list, because Python needs half a microsecond to hand over each; it is never empty, for packages
// of AOTInductor would hand over None.
struct RotaryLayout {
  RotaryNumbers numbers;
  CUDNN_OPS_FIELDS(numbers)

  bool is_interleaved() const {
    return numbers[0] != 0;
  }
  int64_t rotary_dim() const {
    return numbers[1];
  }
  at::IntArrayRef sections() const {
    return at::IntArrayRef(numbers).slice(2);
  }
  // Halves of a whole head, in one section.
  bool is_plain() const {
    return numbers.size() == 2 && !is_interleaved() && rotary_dim() == 0;
  }
};

// What heads turn by.
struct RotaryAngles {
  at::Tensor cos, sin;
  OptionalTensor positions;  // rows of cos and sin, which are tables then
  RotaryLayout layout;
  CUDNN_OPS_FIELDS(cos, sin, positions, layout)
};

// cudnn_ops::_rotary.
struct Rotary {
  at::Tensor input;
  OptionalTensor key;  // turned by the same, with heads of its own
  RotaryAngles angles;
  bool is_backward = false;  // the gradients of the inputs, from those of the outputs
  CUDNN_OPS_FIELDS(input, key, angles, is_backward)
};

using RotaryResults = std::tuple<at::Tensor, at::Tensor>;  // [0] where there is no key

// The public operators.
at::Tensor rotary(const at::Tensor& input, const at::Tensor& cos, const at::Tensor& sin);
at::Tensor rotary_with_options(const at::Tensor& input, const at::Tensor& cos,
                               const at::Tensor& sin, bool interleaved,
                               std::optional<int64_t> rotary_dim, const OptionalTensor& positions,
                               at::OptionalIntArrayRef sections);
RotaryResults rotary_qk(const at::Tensor& query, const at::Tensor& key, const at::Tensor& cos,
                        const at::Tensor& sin, bool interleaved, std::optional<int64_t> rotary_dim,
                        const OptionalTensor& positions, at::OptionalIntArrayRef sections);

void check_rotary(const Rotary& args);
// The same for another operator, whose name begins messages.
void check_rotation(const Rotary& args, const char* op);

}  // namespace cudnn_ops
