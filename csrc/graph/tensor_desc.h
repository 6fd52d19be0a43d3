// All that a plan may depend on of a tensor: element type, sizes, strides and alignment.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <string>

namespace cudnn_ops::graph {

struct TensorDesc {
  static constexpr int kMaxRank = 5;  // conv3d
  // Bytes that addresses and strides must be multiples of: cuDNN's attention kernels load as many
  // at a time and do not check.
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

// What cuDNN requires of the strides of a tensor. kDense stands for contiguous, kChannelsLast for
// the same with the channels last, of an image of two or three dimensions. The others require a
// unit last stride; kAligned also that all others are multiples of 16 bytes, and none of them 0.
enum class Strides { kAligned, kAny, kDense, kChannelsLast };

// Whether cuDNN can read or write this memory as it lies: its strides are such, and its address is
// a multiple of 16.
bool is_addressable(const at::Tensor& tensor, Strides strides = Strides::kAligned);

// The tensor, or a contiguous copy where it is not addressable as kDense.
at::Tensor dense(const at::Tensor& tensor);

// The memory format of an image of two or three dimensions with its channels last.
at::MemoryFormat channels_last(const at::Tensor& image);

}  // namespace cudnn_ops::graph
