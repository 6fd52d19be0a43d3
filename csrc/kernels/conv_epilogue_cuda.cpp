#include "kernels/conv_epilogue.h"

#include "conv_epilogue_images.h"
#include "kernels/conv_epilogue_call.h"
#include "kernels/device_kernel.h"
#include "kernels/row_tiling.h"

#include <ATen/cuda/EmptyTensor.h>

#include <algorithm>
#include <deque>
#include <string>

namespace cudnn_ops {
namespace {

constexpr int64_t kStrip = 32, kVectorBytes = 16;
// Enough rows per thread that the block's one sum, where it adds up, costs little beside them.
// Where it does not, blocks of one turn each are faster until the GPU is full.
constexpr int64_t kTurnsToAddUp = 8;
// Of a block that only activates: small ones fill a GPU more evenly.
constexpr int kThreadsToActivate = 256;

// One for each activation; backward, for a slope too.
class Kernels {
 public:
  Kernels(const std::string& prefix, c10::ArrayRef<std::string_view> names,
          const std::string& suffix) {
    for (const auto name : names) {
      names_.push_back("conv_epilogue_" + prefix + std::string(name) + suffix);
      kernels_.emplace_back(kConvEpilogueImages, names_.back().c_str());
    }
  }
  const DeviceKernel& operator[](Activation activation) const {
    return kernels_[static_cast<size_t>(activation)];
  }

 private:
  std::deque<std::string> names_;
  std::deque<DeviceKernel> kernels_;
};

struct TypeKernels {
  TypeKernels(const std::string& type, const std::string& width)
      : forward_wide("forward_", kActivations, "_" + type + "_" + width),
        forward_narrow("forward_", kActivations, "_" + type + "_1"),
        backward_wide("", kSlopes, "_" + type + "_" + width),
        backward_narrow("", kSlopes, "_" + type + "_1"),
        add_up_name("conv_epilogue_add_up_" + type),
        add_up(kConvEpilogueImages, add_up_name.c_str()) {
  }
  Kernels forward_wide, forward_narrow, backward_wide, backward_narrow;
  std::string add_up_name;
  DeviceKernel add_up;
};

const TypeKernels& kernels_of(at::ScalarType dtype) {
  static const TypeKernels all[3] = {{"half", "8"}, {"bfloat16", "8"}, {"float", "4"}};
  return all[type_index(dtype)];
}

bool is_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kVectorBytes == 0;
}

// Of nothing but the activation, with as many pieces of memory in flight as a GPU needs: a thread
// has one until the GPU is full, then several.
void activate(const at::Tensor& conv, Activation activation, const at::Tensor& out) {
  const auto element = static_cast<int64_t>(conv.element_size());
  const int64_t numbers = conv.numel();
  ConvEpilogueForwardCall call{};
  call.conv = conv.const_data_ptr();
  call.out = out.mutable_data_ptr();
  const bool is_wide =
      numbers * element % kVectorBytes == 0 && is_aligned(call.conv) && is_aligned(call.out);
  const int64_t width = is_wide ? kVectorBytes / element : 1;
  call.rows = numbers / width;
  call.columns = static_cast<unsigned>(width);
  const auto& kernels = kernels_of(conv.scalar_type());
  const auto& kernel = (is_wide ? kernels.forward_wide : kernels.forward_narrow)[activation];
  const int64_t most = divide_up(call.rows, kThreadsToActivate);
  const int64_t least = divide_up(call.rows, kThreadsToActivate * kConvEpilogueAhead);
  const int64_t resident = kernel.resident_blocks(kThreadsToActivate, 0);
  void* argument = &call;
  kernel.launch(std::min(most, std::max(least, resident)), 1, kThreadsToActivate, &argument);
}

}  // namespace

void conv_epilogue_forward(const at::Tensor& conv, const std::optional<at::Tensor>& bias,
                           const std::optional<at::Tensor>& residual, Activation activation,
                           const at::Tensor& before, const at::Tensor& out, ResidualPlace place,
                           BeforeHolds holds) {
  const bool keeps_slope = before.defined() && holds == BeforeHolds::kSlope;
  // The activation's input may be there already.
  const bool has_before = !before.defined() || (before.is_same(conv) && !keeps_slope);
  if (!bias && !residual && has_before) return activate(conv, activation, out);
  const int64_t columns = conv.size(1), rows = conv.numel() / columns;
  ConvEpilogueForwardCall call{};
  call.conv = conv.const_data_ptr();
  call.bias = bias ? bias->const_data_ptr() : nullptr;
  call.residual = residual ? residual->const_data_ptr() : nullptr;
  call.before = before.defined() ? before.mutable_data_ptr() : nullptr;
  call.out = out.mutable_data_ptr();
  call.rows = rows;
  call.columns = static_cast<unsigned>(columns);
  call.adds_last = place == ResidualPlace::kAfter;
  call.keeps_slope = keeps_slope;
  const auto element = static_cast<int64_t>(conv.element_size());
  const bool is_wide = columns * element % kVectorBytes == 0 && is_aligned(call.conv) &&
                       is_aligned(call.bias) && is_aligned(call.residual) &&
                       is_aligned(call.before) && is_aligned(call.out);
  const RowTiling tiling(columns, is_wide ? kVectorBytes / element : 1);
  call.pieces = static_cast<unsigned>(tiling.pieces);
  const auto& kernels = kernels_of(conv.scalar_type());
  const auto& kernel = (is_wide ? kernels.forward_wide : kernels.forward_narrow)[activation];
  const int64_t resident = kernel.resident_blocks(tiling.threads, 0);
  void* argument = &call;
  const int64_t stretches = tiling.stretches(rows, resident, /*least_turns=*/1);
  kernel.launch(tiling.strips, static_cast<int>(stretches), tiling.threads, &argument);
}

void conv_epilogue_backward(const at::Tensor& grad_out, const std::optional<at::Tensor>& saved,
                            Activation activation, const at::Tensor& grad,
                            const at::Tensor& grad_bias) {
  const int64_t columns = grad_out.size(1), rows = grad_out.numel() / columns;
  ConvEpilogueCall call{};
  call.grad_out = grad_out.const_data_ptr();
  call.saved = saved ? saved->const_data_ptr() : nullptr;
  call.grad = grad.defined() ? grad.mutable_data_ptr() : nullptr;
  call.grad_bias = grad_bias.defined() ? grad_bias.mutable_data_ptr() : nullptr;
  call.rows = rows;
  call.columns = static_cast<unsigned>(columns);
  const auto element = static_cast<int64_t>(grad_out.element_size());
  const bool is_wide = columns * element % kVectorBytes == 0 && is_aligned(call.grad_out) &&
                       is_aligned(call.saved) && is_aligned(call.grad);
  const int64_t width = is_wide ? kVectorBytes / element : 1;
  const RowTiling tiling(columns, width);
  call.pieces = static_cast<unsigned>(tiling.pieces);
  const int shared = grad_bias.defined() ? tiling.threads * static_cast<int>(width * 4) : 0;
  const auto& kernels = kernels_of(grad_out.scalar_type());
  const auto& kernel = (is_wide ? kernels.backward_wide : kernels.backward_narrow)[activation];
  const int64_t resident = kernel.resident_blocks(tiling.threads, shared);
  const int64_t stretches =
      tiling.stretches(rows, resident, grad_bias.defined() ? kTurnsToAddUp : 1);
  at::Tensor partial;
  if (grad_bias.defined()) {
    partial =
        at::detail::empty_cuda({stretches * columns}, at::kFloat, grad_out.device(), std::nullopt);
    call.partial = static_cast<float*>(partial.mutable_data_ptr());
    call.partials = static_cast<unsigned>(stretches);
  }
  void* argument = &call;
  kernel.launch(tiling.strips, static_cast<int>(stretches), tiling.threads, &argument, shared);
  if (grad_bias.defined()) {
    kernels.add_up.launch(divide_up(columns, kStrip), 1, 1024, &argument);
  }
}

}  // namespace cudnn_ops
