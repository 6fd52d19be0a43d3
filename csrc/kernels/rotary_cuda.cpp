#include "kernels/rotary.h"

#include "kernels/device_kernel.h"
#include "kernels/rotary_call.h"
#include "rotary_images.h"

namespace cudnn_ops {
namespace {

constexpr int64_t kBytes = 16, kThreads = 256;

const DeviceKernel& kernel_of(at::ScalarType dtype, bool is_angle_float, bool is_wide) {
  static const DeviceKernel half[2][2] = {
      {{kRotaryImages, "rotary_half_1"}, {kRotaryImages, "rotary_half_8"}},
      {{kRotaryImages, "rotary_half_float_1"}, {kRotaryImages, "rotary_half_float_8"}}};
  static const DeviceKernel bfloat16[2][2] = {
      {{kRotaryImages, "rotary_bfloat16_1"}, {kRotaryImages, "rotary_bfloat16_8"}},
      {{kRotaryImages, "rotary_bfloat16_float_1"}, {kRotaryImages, "rotary_bfloat16_float_8"}}};
  static const DeviceKernel single[2] = {{kRotaryImages, "rotary_float_1"},
                                         {kRotaryImages, "rotary_float_4"}};
  if (dtype == at::kFloat) return single[is_wide];
  return (dtype == at::kHalf ? half : bfloat16)[is_angle_float][is_wide];
}

bool is_aligned(const at::Tensor& tensor) {
  bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kBytes == 0;
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim) {
    aligned =
        aligned && tensor.stride(dim) * static_cast<int64_t>(tensor.element_size()) % kBytes == 0;
  }
  return aligned;
}

at::Tensor with_dense_last(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

}  // namespace

void rotate(const at::Tensor& input, const at::Tensor& cos, const at::Tensor& sin, bool is_backward,
            const at::Tensor& out) {
  const int64_t heads = input.size(1), tokens = input.size(2), size = input.size(3);
  const at::Tensor x = with_dense_last(input), c = with_dense_last(cos), s = with_dense_last(sin);
  const auto element = static_cast<int64_t>(x.element_size());
  const bool is_wide =
      size / 2 * element % kBytes == 0 && is_aligned(x) && is_aligned(c) && is_aligned(s);
  const int64_t width = is_wide ? kBytes / element : 1;
  const auto step = [&](const at::Tensor& angles) {
    return angles.size(0) == 1 ? 0 : angles.stride(0);
  };
  RotaryCall call{x.const_data_ptr(),
                  c.const_data_ptr(),
                  s.const_data_ptr(),
                  out.mutable_data_ptr(),
                  x.stride(0),
                  x.stride(1),
                  x.stride(2),
                  step(c),
                  c.stride(1),
                  step(s),
                  s.stride(1),
                  x.numel() / 2 / width,
                  static_cast<unsigned>(tokens),
                  static_cast<unsigned>(heads),
                  static_cast<unsigned>(size / 2 / width),
                  is_backward};
  void* argument = &call;
  kernel_of(x.scalar_type(), c.scalar_type() == at::kFloat, is_wide)
      .launch((call.pieces + kThreads - 1) / kThreads, 1, kThreads, &argument);
}

}  // namespace cudnn_ops
