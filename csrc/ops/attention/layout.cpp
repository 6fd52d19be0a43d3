#include "ops/attention/layout.h"

#include <ATen/ops/constant_pad_nd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace cudnn_ops {

std::array<int64_t, 4> dense_strides_like(c10::IntArrayRef sizes, const at::Tensor& like) {
  // Outermost first. A broadcast dimension (stride 0) says nothing of an order: outermost.
  const auto position = [&](int dim) {
    const int64_t stride = like.stride(dim);
    return stride == 0 ? std::numeric_limits<int64_t>::max() : stride;
  };
  std::array<int, 3> order{0, 1, 2};
  // Sorted, stably: std::stable_sort takes memory for it.
  for (const int end : {1, 2}) {
    for (int i = end; i > 0 && position(order[i - 1]) < position(order[i]); --i) {
      std::swap(order[i - 1], order[i]);
    }
  }
  std::array<int64_t, 4> strides{};
  strides[3] = 1;
  int64_t step = std::max<int64_t>(sizes[3], 1);
  for (int i = 2; i >= 0; --i) {
    strides[order[i]] = step;
    step *= std::max<int64_t>(sizes[order[i]], 1);
  }
  return strides;
}

bool has_regular_size(const at::Tensor& tensor) {
  const c10::SymInt size = tensor.sym_size(-1);
  return TORCH_GUARD_OR_TRUE((size % kRowUnit).sym_eq(0)) && TORCH_GUARD_OR_TRUE(size.sym_ge(1));
}

bool has_unit_stride(const at::Tensor& tensor) {
  return TORCH_GUARD_OR_TRUE(tensor.sym_stride(-1).sym_eq(1));
}

bool has_regular_rows(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.dim() == 0) return true;
  return has_unit_stride(tensor) && has_regular_size(tensor);
}

at::Tensor with_regular_rows(const at::Tensor& tensor) {
  at::Tensor rows = tensor;
  if (!has_regular_size(rows)) {
    const int64_t size = rows.sym_size(-1).guard_int(__FILE__, __LINE__);
    const int64_t whole = std::max<int64_t>((size + kRowUnit - 1) / kRowUnit, 1) * kRowUnit;
    rows = at::constant_pad_nd(rows, std::array<int64_t, 2>{0, whole - size});
  }
  // Not contiguous(), which leaves an empty tensor its strides.
  return has_unit_stride(rows) ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

std::optional<double> scale_of_rows(std::optional<double> scale, const at::Tensor& query) {
  if (scale || has_regular_size(query)) return scale;
  const int64_t size = query.sym_size(-1).guard_int(__FILE__, __LINE__);
  return size == 0 ? 1.0 : 1.0 / std::sqrt(static_cast<double>(size));
}

}  // namespace cudnn_ops
