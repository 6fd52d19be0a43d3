#include "kernels/gated.h"

#include "gated_images.h"
#include "kernels/device_kernel.h"
#include "kernels/gated_call.h"

namespace cudnn_ops {
namespace {

constexpr int kThreads = 256;

// A tensor as [rows, columns] with a unit last stride, copied only if it cannot be seen as that. A
// view of torch's would cost the host half a microsecond.
class Rows {
 public:
  explicit Rows(const at::Tensor& tensor)
      : tensor_(c10::MaybeOwned<at::Tensor>::borrowed(tensor)),
        columns_(tensor.dim() == 0 ? 1 : tensor.size(-1)),
        stride_(columns_) {
    if (tensor.is_contiguous() || see()) return;
    tensor_ = c10::MaybeOwned<at::Tensor>::owned(tensor.contiguous());
    stride_ = columns_;
  }

  const void* data() const {
    return tensor_->const_data_ptr();
  }
  void* mutable_data() const {
    return tensor_->mutable_data_ptr();
  }
  int64_t columns() const {
    return columns_;
  }
  int64_t stride() const {
    return stride_;
  }
  bool is_aligned() const {
    constexpr int64_t kBytes = 16;
    const auto element = static_cast<int64_t>(tensor_->element_size());
    return reinterpret_cast<uintptr_t>(data()) % kBytes == 0 &&
           (tensor_->numel() == columns_ || stride_ * element % kBytes == 0) &&
           columns_ * element % kBytes == 0;
  }

 private:
  bool see() {
    if (tensor_->stride(-1) != 1 && columns_ != 1) return false;
    const auto sizes = tensor_->sizes(), strides = tensor_->strides();
    bool is_first = true;
    int64_t expected = 0;
    for (int64_t dim = tensor_->dim() - 2; dim >= 0; --dim) {
      if (sizes[dim] == 1) continue;
      if (is_first) {
        stride_ = strides[dim];
      } else if (strides[dim] != expected) {
        return false;
      }
      expected = strides[dim] * sizes[dim];
      is_first = false;
    }
    return true;
  }

  c10::MaybeOwned<at::Tensor> tensor_;
  int64_t columns_, stride_;
};

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

// Writes `first`, and in the backward `second`.
void launch(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& grad_out,
            GatedActivation activation, const at::Tensor& first, const at::Tensor& second) {
  if (gate.numel() == 0) return;
  const bool is_backward = grad_out.defined();
  const Rows g(gate), u(up), d(is_backward ? grad_out : gate);
  const Rows f(first), s(is_backward ? second : first);
  const bool is_wide =
      g.is_aligned() && u.is_aligned() && d.is_aligned() && f.is_aligned() && s.is_aligned();
  const int64_t width = is_wide ? 16 / static_cast<int64_t>(gate.element_size()) : 1;
  GatedCall call{g.data(),
                 u.data(),
                 is_backward ? d.data() : nullptr,
                 f.mutable_data(),
                 is_backward ? s.mutable_data() : nullptr,
                 g.stride(),
                 u.stride(),
                 is_backward ? d.stride() : 0,
                 f.stride(),
                 gate.numel() / width,
                 g.columns() / width};
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
