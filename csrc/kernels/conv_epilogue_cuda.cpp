#include "conv_epilogue.h"

#include "conv_epilogue_call.h"
#include "conv_epilogue_images.h"
#include "device_kernel.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/EmptyTensor.h>

#include <algorithm>

namespace cudnn_ops {
namespace {

constexpr int64_t kThreads = 512, kStrip = 32, kVectorBytes = 16;

struct Kernels {
  DeviceKernel wide[5], narrow[5];  // by the activation
  DeviceKernel add_up;
};

#define CUDNN_OPS_EPILOGUES(type, width)                               \
  {                                                                    \
    {kConvEpilogueImages, "conv_epilogue_none_" type "_" width},       \
        {kConvEpilogueImages, "conv_epilogue_relu_" type "_" width},   \
        {kConvEpilogueImages, "conv_epilogue_silu_" type "_" width},   \
        {kConvEpilogueImages, "conv_epilogue_gelu_" type "_" width}, { \
      kConvEpilogueImages, "conv_epilogue_gelu_tanh_" type "_" width   \
    }                                                                  \
  }
#define CUDNN_OPS_KERNELS(type, width)                                  \
  {                                                                     \
    CUDNN_OPS_EPILOGUES(type, width), CUDNN_OPS_EPILOGUES(type, "1"), { \
      kConvEpilogueImages, "conv_epilogue_add_up_" type                 \
    }                                                                   \
  }

const Kernels& kernels_of(at::ScalarType dtype) {
  static const Kernels all[3] = {CUDNN_OPS_KERNELS("half", "8"), CUDNN_OPS_KERNELS("bfloat16", "8"),
                                 CUDNN_OPS_KERNELS("float", "4")};
  return all[type_index(dtype)];
}

bool is_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kVectorBytes == 0;
}

}  // namespace

void conv_epilogue_backward(const at::Tensor& grad_out, const OptionalTensor& saved,
                            ConvActivation activation, const at::Tensor& grad,
                            const at::Tensor& grad_bias) {
  const int64_t columns = grad_out.size(1), rows = grad_out.numel() / columns;
  // A saved-tensor hook may have brought it back in another memory format.
  const at::Tensor kept = saved ? saved->contiguous(channels_last(grad_out)) : at::Tensor();
  ConvEpilogueCall call{};
  call.grad_out = grad_out.const_data_ptr();
  call.saved = kept.defined() ? kept.const_data_ptr() : nullptr;
  call.grad = grad.defined() ? grad.mutable_data_ptr() : nullptr;
  call.grad_bias = grad_bias.defined() ? grad_bias.mutable_data_ptr() : nullptr;
  call.rows = rows;
  call.columns = static_cast<unsigned>(columns);
  const auto element = static_cast<int64_t>(grad_out.element_size());
  const bool is_wide = columns * element % kVectorBytes == 0 && is_aligned(call.grad_out) &&
                       is_aligned(call.saved) && is_aligned(call.grad);
  const int64_t width = is_wide ? kVectorBytes / element : 1;
  const int64_t row_pieces = columns / width, pieces = std::min(row_pieces, kThreads);
  const int64_t rows_at_once = kThreads / pieces, strips = (row_pieces + pieces - 1) / pieces;
  call.pieces = static_cast<unsigned>(pieces);
  const auto threads = static_cast<int>(pieces * rows_at_once);
  const int shared = grad_bias.defined() ? threads * static_cast<int>(width * 4) : 0;
  const auto& kernels = kernels_of(grad_out.scalar_type());
  const auto& kernel = (is_wide ? kernels.wide : kernels.narrow)[static_cast<int>(activation)];
  // So many rows a block that adding up the blocks' sums is nothing beside them.
  constexpr int64_t kLeastTurns = 8;
  const int64_t wanted = (rows + rows_at_once * kLeastTurns - 1) / (rows_at_once * kLeastTurns);
  const int64_t resident = kernel.resident_blocks(threads, shared);
  const int64_t stretches = std::max<int64_t>(1, std::min(wanted, resident / strips));
  at::Tensor partial;
  if (grad_bias.defined()) {
    partial =
        at::detail::empty_cuda({stretches * columns}, at::kFloat, grad_out.device(), std::nullopt);
    call.partial = static_cast<float*>(partial.mutable_data_ptr());
    call.partials = static_cast<unsigned>(stretches);
  }
  void* argument = &call;
  kernel.launch(strips, static_cast<int>(stretches), threads, &argument, shared);
  if (grad_bias.defined()) {
    kernels.add_up.launch((columns + kStrip - 1) / kStrip, 1, 1024, &argument);
  }
}

}  // namespace cudnn_ops
