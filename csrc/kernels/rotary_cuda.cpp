#include "kernels/rotary.h"

#include "kernels/device_kernel.h"
#include "kernels/rotary_any.h"
#include "kernels/tensor_rows.h"
#include "rotary_images.h"

#include <algorithm>
#include <limits>

namespace cudnn_ops {
namespace {

constexpr int64_t kBytes = 16, kThreads = 256;

// Of each type, with factors of the same and of float32.
using Kernels = DeviceKernel[5];
#define ROTARY_KERNELS(kind, width, float_width)                                                  \
  {                                                                                               \
    {kRotaryImages, kind "half_" width}, {kRotaryImages, kind "half_float_" width},               \
        {kRotaryImages, kind "bfloat16_" width}, {kRotaryImages, kind "bfloat16_float_" width}, { \
      kRotaryImages, kind "float_" float_width                                                    \
    }                                                                                             \
  }

// The stride of a dimension, of which one may stand for all.
int64_t step(const at::Tensor& tensor, int64_t dim) {
  return tensor.size(dim) == 1 ? 0 : tensor.stride(dim);
}

RotaryFactors factors_of(const at::Tensor& factors) {
  const int64_t rows = factors.dim() - 2;
  return {factors.const_data_ptr(), rows > 1 ? factors.stride(0) : 0,
          rows > 0 ? step(factors, rows - 1) : 0, factors.stride(rows)};
}

// Whether the pairs of no piece are in two sections.
bool are_whole(at::IntArrayRef sections, int64_t pairs_of_piece) {
  return std::all_of(sections.begin(), sections.end(),
                     [&](int64_t pairs) { return pairs % pairs_of_piece == 0; });
}

}  // namespace

at::Tensor with_dense_last(const at::Tensor& tensor) {
  return !tensor.defined() || tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

RotaryHeads heads_of(const at::Tensor& input, const at::Tensor& out) {
  if (!input.defined()) return {};
  return {input.const_data_ptr(), out.mutable_data_ptr(), input.stride(0),
          input.stride(1),        input.stride(2),        static_cast<unsigned>(input.size(1))};
}

void rotate(const at::Tensor& input, const at::Tensor& cos, const at::Tensor& sin, bool is_backward,
            const at::Tensor& out) {
  const int64_t heads = input.size(1), tokens = input.size(2), size = input.size(3);
  const at::Tensor x = with_dense_last(input), c = with_dense_last(cos), s = with_dense_last(sin);
  const auto element = static_cast<int64_t>(x.element_size());
  const bool is_wide = size / 2 * element % kBytes == 0 && are_rows_aligned(x) &&
                       are_rows_aligned(c) && are_rows_aligned(s);
  const int64_t width = is_wide ? kBytes / element : 1;
  RotaryCall call{x.const_data_ptr(),
                  c.const_data_ptr(),
                  s.const_data_ptr(),
                  out.mutable_data_ptr(),
                  x.stride(0),
                  x.stride(1),
                  x.stride(2),
                  step(c, 0),
                  c.stride(1),
                  step(s, 0),
                  s.stride(1),
                  x.numel() / 2 / width,
                  static_cast<unsigned>(tokens),
                  static_cast<unsigned>(heads),
                  static_cast<unsigned>(size / 2 / width),
                  is_backward};
  void* argument = &call;
  static const Kernels narrow = ROTARY_KERNELS("rotary_", "1", "1");
  static const Kernels wide = ROTARY_KERNELS("rotary_", "8", "4");
  const Kernels& kernels = is_wide ? wide : narrow;
  kernels[rotary_kernel_index(x, c)].launch((call.pieces + kThreads - 1) / kThreads, 1, kThreads,
                                            &argument);
}

RotaryAny::RotaryAny(const at::Tensor& query, const at::Tensor& key, const RotaryTurn& turn,
                     const at::Tensor& query_out, const at::Tensor& key_out, bool may_be_wide)
    : q(with_dense_last(query)),
      k(with_dense_last(key)),
      c(with_dense_last(turn.cos)),
      s(with_dense_last(turn.sin)) {
  const int64_t tokens = q.size(2), size = q.size(3);
  const auto element = static_cast<int64_t>(q.element_size());
  width = kBytes / element;
  is_wide = may_be_wide && turn.size / 2 % width == 0 && size % width == 0 && are_rows_aligned(q) &&
            (!k.defined() || are_rows_aligned(k)) && are_rows_aligned(c) && are_rows_aligned(s) &&
            are_whole(turn.sections, turn.is_interleaved ? width / 2 : width);
  if (!is_wide) width = 1;
  call.query = heads_of(q, query_out);
  call.key = heads_of(k, key_out);
  call.cos = factors_of(c);
  call.sin = factors_of(s);
  const at::Tensor& positions = turn.positions;
  if (positions.defined()) {
    call.positions = positions.const_data_ptr();
    const int64_t tokens_dim = positions.dim() - 1;
    call.position_axis_stride = tokens_dim > 1 ? positions.stride(0) : 0;
    call.position_batch_stride = step(positions, tokens_dim - 1);
    call.position_token_stride = positions.stride(tokens_dim);
    call.table_rows = c.size(0);
    call.has_long_positions = positions.scalar_type() == at::kLong;
  }
  unsigned end = 0;
  for (size_t i = 0; i + 1 < kMostSections; ++i) {
    if (i + 1 < turn.sections.size()) end += static_cast<unsigned>(turn.sections[i]);
    call.ends[i] = i + 1 < turn.sections.size() ? end : std::numeric_limits<unsigned>::max();
  }
  call.half = static_cast<unsigned>(turn.size / 2 / width);
  call.pieces = static_cast<unsigned>(size / width);
  call.row_items = call.half + (call.pieces - 2 * call.half + 1) / 2;
  const int64_t heads = static_cast<int64_t>(call.query.heads) + call.key.heads;
  call.items = q.size(0) * tokens * heads * call.row_items;
  call.tokens = static_cast<unsigned>(tokens);
  call.is_interleaved = turn.is_interleaved;
  call.has_factor_of_pair = c.size(-1) < turn.size;
  call.is_backward = turn.is_backward;
}

int rotary_kernel_index(const at::Tensor& input, const at::Tensor& cos) {
  const bool has_wider_factors = input.scalar_type() != cos.scalar_type();
  return 2 * type_index(input.scalar_type()) + (has_wider_factors ? 1 : 0);
}

void rotate_any(const at::Tensor& query, const at::Tensor& key, const RotaryTurn& turn,
                const at::Tensor& query_out, const at::Tensor& key_out) {
  RotaryAny any(query, key, turn, query_out, key_out, /*may_be_wide=*/true);
  if (any.call.items == 0) return;
  static const Kernels narrow = ROTARY_KERNELS("rotary_any_", "1", "1");
  static const Kernels wide = ROTARY_KERNELS("rotary_any_", "8", "4");
  static const Kernels wide_pairs = ROTARY_KERNELS("rotary_pairs_", "8", "4");
  const Kernels& kernels = !any.is_wide ? narrow : turn.is_interleaved ? wide_pairs : wide;
  void* argument = &any.call;
  kernels[rotary_kernel_index(any.q, any.c)].launch(divide_up(any.call.items, kThreads), 1,
                                                    kThreads, &argument);
}

}  // namespace cudnn_ops
