#include "kernels/gated.h"

#include "gated_images.h"
#include "kernels/device_kernel.h"
#include "kernels/gated_call.h"

namespace cudnn_ops {
namespace {

constexpr int kThreads = 256;

// The tensor as [rows, columns] with a unit last stride, copied only if it cannot be seen as that.
at::Tensor as_rows(const at::Tensor& tensor) {
  const int64_t columns = tensor.dim() == 0 ? 1 : tensor.size(-1);
  if (tensor.is_contiguous()) return tensor.view({-1, columns});
  if (tensor.stride(-1) == 1 || columns == 1) {
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    bool is_regular = true, is_first = true;
    int64_t expected = 0;
    for (int64_t dim = tensor.dim() - 2; dim >= 0; --dim) {
      if (sizes[dim] == 1) continue;
      is_regular = is_regular && (is_first || strides[dim] == expected);
      expected = strides[dim] * sizes[dim];
      is_first = false;
    }
    if (is_regular) return tensor.view({-1, columns});
  }
  return tensor.contiguous().view({-1, columns});
}

const DeviceKernel& kernel_of(GatedActivation activation, at::ScalarType dtype, bool is_wide,
                              bool is_backward) {
#define CUDNN_OPS_GATED(name, type)                                                            \
  {                                                                                            \
    {kGatedImages, "gated_" name "_" type}, {kGatedImages, "gated_" name "_" type "_backward"} \
  }
#define CUDNN_OPS_GATED_TYPES(name)                                             \
  CUDNN_OPS_GATED(name, "half_1"), CUDNN_OPS_GATED(name, "half_8"),             \
      CUDNN_OPS_GATED(name, "bfloat16_1"), CUDNN_OPS_GATED(name, "bfloat16_8"), \
      CUDNN_OPS_GATED(name, "float_1"), CUDNN_OPS_GATED(name, "float_4")
  static const DeviceKernel kernels[18][2] = {CUDNN_OPS_GATED_TYPES("silu"),
                                              CUDNN_OPS_GATED_TYPES("gelu"),
                                              CUDNN_OPS_GATED_TYPES("gelu_tanh")};
#undef CUDNN_OPS_GATED_TYPES
#undef CUDNN_OPS_GATED
  return kernels[6 * static_cast<int>(activation) + 2 * type_index(dtype) + is_wide][is_backward];
}

bool is_aligned(const at::Tensor& rows) {
  constexpr int64_t kBytes = 16;
  const int64_t element = rows.element_size();
  return reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % kBytes == 0 &&
         (rows.size(0) == 1 || rows.stride(0) * element % kBytes == 0) &&
         rows.size(1) * element % kBytes == 0;
}

// Writes `first`, and in the backward `second`.
void launch(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& grad_out,
            GatedActivation activation, const at::Tensor& first, const at::Tensor& second) {
  if (gate.numel() == 0) return;
  const bool is_backward = grad_out.defined();
  const at::Tensor g = as_rows(gate), u = as_rows(up);
  const at::Tensor d = is_backward ? as_rows(grad_out) : at::Tensor();
  const at::Tensor f = as_rows(first), s = is_backward ? as_rows(second) : f;
  const bool is_wide = is_aligned(g) && is_aligned(u) && is_aligned(f) && is_aligned(s) &&
                       (!is_backward || is_aligned(d));
  const int64_t columns = g.size(1);
  const int64_t width = is_wide ? 16 / static_cast<int64_t>(g.element_size()) : 1;
  GatedCall call{g.const_data_ptr(),
                 u.const_data_ptr(),
                 is_backward ? d.const_data_ptr() : nullptr,
                 f.mutable_data_ptr(),
                 is_backward ? s.mutable_data_ptr() : nullptr,
                 g.stride(0),
                 u.stride(0),
                 is_backward ? d.stride(0) : 0,
                 f.stride(0),
                 g.numel() / width,
                 columns / width};
  void* argument = &call;
  kernel_of(activation, gate.scalar_type(), is_wide, is_backward)
      .launch((call.pieces + kThreads - 1) / kThreads, 1, kThreads, &argument);
}

}  // namespace

void gated_forward(const at::Tensor& gate, const at::Tensor& up, GatedActivation activation,
                   const at::Tensor& out) {
  launch(gate, up, at::Tensor(), activation, out, at::Tensor());
}

void gated_backward(const at::Tensor& grad_out, const at::Tensor& gate, const at::Tensor& up,
                    GatedActivation activation, const at::Tensor& grad_gate,
                    const at::Tensor& grad_up) {
  launch(gate, up, grad_out, activation, grad_gate, grad_up);
}

}  // namespace cudnn_ops
