#include "kernels/norm_rows.h"

#include "norm_backward_bfloat16_images.h"
#include "norm_backward_float_images.h"
#include "norm_backward_half_images.h"
#include "norm_forward_bfloat16_images.h"
#include "norm_forward_float_images.h"
#include "norm_forward_half_images.h"
#include "kernels/device_kernel.h"
#include "kernels/norm_launch.h"
#include "kernels/norm_rows_call.h"
#include "kernels/tensor_rows.h"

#include <ATen/cuda/EmptyTensor.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <array>

namespace cudnn_ops {
namespace {

template <class T = void>
T* data_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
}

at::Tensor dense(const std::optional<at::Tensor>& parameter) {
  return parameter ? parameter->contiguous() : at::Tensor();
}

// What both directions have in common.
NormCall call_of(const NormOfRows& args, const TensorRows& input, const at::Tensor& weight) {
  NormCall call{};
  const auto sizes = args.input.sizes().slice(static_cast<size_t>(args.row_dims));
  const int64_t columns = c10::multiply_integers(sizes);
  const int64_t rows = args.input.numel() / columns;
  TORCH_CHECK_VALUE(rows < INT32_MAX && columns < INT32_MAX, args.op,
                    ": no more than 2^31 rows, or numbers in a row; got ", rows, " of ", columns);
  call.input = input.get();
  call.weight = data_of(weight);
  call.rows = static_cast<unsigned>(rows);
  call.columns = static_cast<unsigned>(columns);
  call.eps = static_cast<float>(args.eps);
  call.is_layer = args.is_layer;
  call.zero_centered = args.zero_centered;
  call.is_weight_float = weight.defined() && weight.scalar_type() == at::kFloat;
  return call;
}

// `row_bits`: the bits that are set in the address of some row.
NormProblem problem_of(const NormCall& call, unsigned number_bytes, uint64_t row_bits) {
  const auto parameter_bits =
      reinterpret_cast<uintptr_t>(call.weight) | reinterpret_cast<uintptr_t>(call.bias);
  const uint64_t bits = row_bits | static_cast<uint64_t>(call.columns) * number_bytes;
  const bool is_aligned = parameter_bits % 16 == 0;
  const unsigned piece_bytes = is_aligned && bits % 16 == 0  ? 16
                               : is_aligned && bits % 8 == 0 ? 8
                                                             : number_bytes;
  return {call.rows, call.columns, number_bytes, piece_bytes};
}

// The kernels that keep a row in registers, by type, kind and the index of their spread. Not every
// direction uses every index.
constexpr int kSpreads = 12;

int index_of(const NormSpread& how) {
  if (how.bytes == 16) {
    constexpr int kIndices[] = {-1, 0, 1, -1, 2, 10, 11, -1, 7};  // by the number of pieces
    return kIndices[how.vectors];
  }
  return (how.bytes == 8 ? 3 : 5) + (how.vectors <= 2 ? 0 : 1);
}

// The backward has some kernels with fewer stages.
int index_of(const NormBackwardLaunch& launch) {
  const int index = index_of(launch.how);
  return index == 2 ? launch.stages == 2 ? 8 : launch.stages == 1 ? 9 : index : index;
}

using Kernels = DeviceKernel[2][kSpreads];

#define CUDNN_OPS_KIND(images, name)                                                           \
  {                                                                                            \
    {images, name "_16_1", true}, {images, name "_16_2", true}, {images, name "_16_4", true},  \
        {images, name "_8_1", true}, {images, name "_8_4", true}, {images, name "_n_2", true}, \
        {images, name "_n_8", true}, {images, name "_16_8", true},                             \
        {images, name "_16_4_stages_2", true}, {images, name "_16_4_stages_1", true},          \
        {images, name "_16_5", true}, {                                                        \
      images, name "_16_6", true                                                               \
    }                                                                                          \
  }
#define CUDNN_OPS_KINDS(images, direction) \
  {CUDNN_OPS_KIND(images, "rms_norm_" direction), CUDNN_OPS_KIND(images, "layer_norm_" direction)}
#define CUDNN_OPS_TYPES(direction, name)                    \
  {CUDNN_OPS_KINDS(kNorm##direction##HalfImages, name),     \
   CUDNN_OPS_KINDS(kNorm##direction##BFloat16Images, name), \
   CUDNN_OPS_KINDS(kNorm##direction##FloatImages, name)}
#define CUDNN_OPS_ANY(direction, name)                                                            \
  {                                                                                               \
    {kNorm##direction##HalfImages, name, true}, {kNorm##direction##BFloat16Images, name, true}, { \
      kNorm##direction##FloatImages, name, true                                                   \
    }                                                                                             \
  }

void launch_forward(NormCall& call, int type, const NormProblem& problem) {
  static const Kernels kernels[3] = CUDNN_OPS_TYPES(Forward, "forward");
  static const DeviceKernel any[2][3] = {CUDNN_OPS_ANY(Forward, "norm_forward_any_n"),
                                         CUDNN_OPS_ANY(Forward, "norm_forward_any_16")};
  const NormForwardLaunch launch = norm_forward_launch(problem);
  call.group = launch.how.group;
  const auto& kernel = launch.how.vectors == 0 ? any[problem.piece_bytes == 16][type]
                                               : kernels[type][call.is_layer][index_of(launch.how)];
  void* argument = &call;
  kernel.launch(launch.blocks, 1, launch.threads, &argument);
}

// Memory for the rows of sums that the backward's kernels write.
at::Tensor allocate_partials(NormCall& call, int64_t count, const at::Device& device) {
  const int64_t numbers = (call.is_layer ? 2 : 1) * count * static_cast<int64_t>(call.columns);
  at::Tensor memory = at::detail::empty_cuda({numbers}, at::kFloat, device, std::nullopt);
  call.partials = static_cast<unsigned>(count);
  call.partial = static_cast<float*>(memory.mutable_data_ptr());
  return memory;
}

void launch_backward(NormCall& call, int type, const NormBackwardProblem& problem,
                     const at::Device& device) {
  static const Kernels kernels[3] = CUDNN_OPS_TYPES(Backward, "backward");
  static const DeviceKernel any[2][3] = {CUDNN_OPS_ANY(Backward, "norm_backward_any_n"),
                                         CUDNN_OPS_ANY(Backward, "norm_backward_any_16")};
  static const DeviceKernel few[2][3] = {CUDNN_OPS_ANY(Backward, "norm_backward_few_n"),
                                         CUDNN_OPS_ANY(Backward, "norm_backward_few_16")};
  static const DeviceKernel partial[2][3] = {CUDNN_OPS_ANY(Backward, "norm_partial_n"),
                                             CUDNN_OPS_ANY(Backward, "norm_partial_16")};
  static const DeviceKernel columns[3] = CUDNN_OPS_ANY(Backward, "norm_columns");
  constexpr int kPartialThreads = 512, kColumnThreads = 1024, kColumns = 32;  // as they declare
  const NormBackwardLaunch launch = norm_backward_launch(problem, current_limits());
  const bool is_wide_piece = problem.piece_bytes == 16;
  const auto shared = static_cast<int>(launch.shared_bytes);
  void* argument = &call;
  call.group = launch.how.group;
  call.row_bytes = launch.row_bytes;
  if (launch.way == NormBackwardWay::kFew) {
    return few[is_wide_piece][type].launch(launch.blocks, 1, launch.threads, &argument);
  }
  at::Tensor partials;
  if (launch.way == NormBackwardWay::kAny) {
    const auto& kernel = any[is_wide_piece][type];
    if (problem.needs_rows) kernel.launch(launch.blocks, 1, launch.threads, &argument);
  } else if (launch.has_sums || problem.needs_rows) {
    const auto& kernel = kernels[type][call.is_layer][index_of(launch)];
    const int64_t blocks = std::min(launch.blocks, kernel.resident_blocks(launch.threads, shared));
    if (problem.needs_columns && launch.has_sums) {
      partials = allocate_partials(call, blocks, device);
    }
    kernel.launch(blocks, 1, launch.threads, &argument, shared);
    if (launch.has_sums && blocks == 1) return;  // it wrote the sums
  }
  if (!problem.needs_columns) return;
  if (!launch.has_sums) {
    partials = allocate_partials(call, launch.stretches, device);
    partial[is_wide_piece][type].launch(launch.strips, static_cast<int>(launch.stretches),
                                        kPartialThreads, &argument);
  }
  columns[type].launch((problem.columns + kColumns - 1) / kColumns, call.is_layer ? 2 : 1,
                       kColumnThreads, &argument);
}

}  // namespace

void norm_rows(const NormOfRows& args, const at::Tensor& out, const at::Tensor& sum,
               const at::Tensor& mean, const at::Tensor& rstd) {
  const TensorRows input(args.input, args.row_dims);
  const TensorRows residual(args.residual.value_or(at::Tensor()), args.row_dims);
  at::Tensor weight = dense(args.weight), bias = dense(args.bias);
  const auto is_float = [](const at::Tensor& parameter) {
    return parameter.defined() && parameter.scalar_type() == at::kFloat;
  };
  // The kernels require both to have one type.
  if (is_float(weight) && bias.defined()) bias = bias.to(at::kFloat);
  if (is_float(bias) && weight.defined()) weight = weight.to(at::kFloat);
  NormCall call = call_of(args, input, weight);
  call.is_weight_float = call.is_bias_float = is_float(weight) || is_float(bias);
  call.residual = residual.get();
  call.bias = data_of(bias);
  call.out = data_of(out);
  call.sum = data_of(sum);
  call.mean = data_of<float>(mean);
  call.rstd = data_of<float>(rstd);
  launch_forward(call, type_index(args.input.scalar_type()),
                 problem_of(call, static_cast<unsigned>(args.input.element_size()),
                            input.address_bits() | residual.address_bits()));
}

void norm_rows_backward(const NormOfRows& args, const at::Tensor& grad_out,
                        const at::Tensor& grad_sum, const at::Tensor& mean, const at::Tensor& rstd,
                        const at::Tensor& grad_input, const at::Tensor& grad_weight,
                        const at::Tensor& grad_bias) {
  const int64_t row_dims = args.row_dims;
  const TensorRows input(args.input, row_dims), grads(grad_out, row_dims), more(grad_sum, row_dims);
  const at::Tensor weight = dense(args.weight);
  NormCall call = call_of(args, input, weight);
  call.grad_out = grads.get();
  call.grad_sum = more.get();
  call.mean = data_of<float>(mean);
  call.rstd = data_of<float>(rstd);
  call.out = data_of(grad_input);
  call.grad_weight = data_of(grad_weight);
  call.grad_bias = data_of(grad_bias);
  call.is_bias_float = grad_bias.defined() && grad_bias.scalar_type() == at::kFloat;
  const auto bits = input.address_bits() | grads.address_bits() | more.address_bits();
  const bool needs_columns = call.grad_weight != nullptr || call.grad_bias != nullptr;
  launch_backward(call, type_index(args.input.scalar_type()),
                  {problem_of(call, static_cast<unsigned>(args.input.element_size()), bits),
                   call.out != nullptr, needs_columns},
                  args.input.device());
}

}  // namespace cudnn_ops
