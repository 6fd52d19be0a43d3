// All that a plan may know of a tensor: element type, sizes, strides and alignment.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <string>

namespace cudnn_ops::graph {

struct TensorDesc {
  static constexpr int kMaxRank = 5;  // conv3d
  // Native attention kernels load 16 bytes at a time and do not check what they are given.
  static constexpr int64_t kAlignment = 16;

  c10::ScalarType dtype = c10::ScalarType::Undefined;
  int rank = 0;
  std::array<int64_t, kMaxRank> sizes{};
  std::array<int64_t, kMaxRank> strides{};  // in elements

  TensorDesc() = default;
  TensorDesc(c10::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides);
  static TensorDesc of(const at::Tensor& tensor) {
    return {tensor.scalar_type(), tensor.sizes(), tensor.strides()};
  }

  std::string str() const;  // "bf16[2, 8, 128, 64]:[65536, 64, 512, 1]"
};

// Whether cuDNN can read or write this memory as it lies: unit last stride, no broadcast
// (zero) stride, every other stride and the address itself multiples of 16 bytes.
bool is_addressable(const at::Tensor& tensor);

}  // namespace cudnn_ops::graph
