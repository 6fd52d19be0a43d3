#include "graph/tensor_desc.h"

#include <algorithm>
#include <sstream>

namespace cudnn_ops::graph {
namespace {

const char* short_name(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Half: return "fp16";
    case c10::ScalarType::BFloat16: return "bf16";
    case c10::ScalarType::Float: return "fp32";
    case c10::ScalarType::Double: return "fp64";
    case c10::ScalarType::Float8_e4m3fn: return "e4m3";
    case c10::ScalarType::Float8_e5m2: return "e5m2";
    default: return c10::toString(dtype);
  }
}

bool has_strides(const at::Tensor& tensor, Strides required) {
  if (required == Strides::kDense) return tensor.is_contiguous();
  if (required == Strides::kChannelsLast) return tensor.is_contiguous(channels_last(tensor));
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  const auto element = static_cast<int64_t>(tensor.element_size());
  const size_t last = sizes.size() - 1;
  if (sizes[last] > 1 && strides[last] != 1) return false;
  if (required == Strides::kAny) return true;
  for (size_t i = 0; i < last; ++i) {
    if (sizes[i] > 1 && (strides[i] == 0 || strides[i] * element % TensorDesc::kAlignment != 0)) {
      return false;
    }
  }
  return true;
}

}  // namespace

TensorDesc::TensorDesc(c10::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides)
    : dtype(dtype), rank(static_cast<int>(sizes.size())) {
  std::copy(sizes.begin(), sizes.end(), this->sizes.begin());
  std::copy(strides.begin(), strides.end(), this->strides.begin());
  // The stride of a dimension of size 1 addresses nothing, and callers leave anything in it.
  // One fixed value (the extent of the rest) keeps such tensors on one plan.
  int64_t extent = 1;
  for (int i = 0; i < rank; ++i) {
    if (sizes[i] > 1) extent = std::max(extent, sizes[i] * strides[i]);
  }
  for (int i = 0; i + 1 < rank; ++i) {
    if (sizes[i] == 1) this->strides[i] = extent;
  }
}

std::string TensorDesc::str() const {
  std::ostringstream out;
  out << short_name(dtype) << c10::IntArrayRef(sizes.data(), rank) << ":"
      << c10::IntArrayRef(strides.data(), rank);
  return out.str();
}

at::MemoryFormat channels_last(const at::Tensor& image) {
  return image.dim() == 5 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
}

bool is_addressable(const at::Tensor& tensor, Strides strides) {
  return has_strides(tensor, strides) &&
         reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % TensorDesc::kAlignment == 0;
}

at::Tensor dense(const at::Tensor& tensor) {
  if (is_addressable(tensor, Strides::kDense)) return tensor;
  return tensor.clone(at::MemoryFormat::Contiguous);
}

}  // namespace cudnn_ops::graph
