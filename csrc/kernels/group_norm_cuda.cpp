#include "kernels/group_norm.h"

#include "group_norm_backward_bfloat16_images.h"
#include "group_norm_backward_float_images.h"
#include "group_norm_backward_half_images.h"
#include "group_norm_cluster_bfloat16_images.h"
#include "group_norm_cluster_half_images.h"
#include "group_norm_forward_bfloat16_images.h"
#include "group_norm_forward_float_images.h"
#include "group_norm_forward_half_images.h"
#include "group_norm_held_backward_bfloat16_images.h"
#include "group_norm_held_backward_float_images.h"
#include "group_norm_held_backward_half_images.h"
#include "group_norm_held_bfloat16_images.h"
#include "group_norm_held_float_images.h"
#include "group_norm_held_half_images.h"
#include "group_norm_resident_bfloat16_images.h"
#include "group_norm_resident_float_images.h"
#include "group_norm_resident_first_bfloat16_images.h"
#include "group_norm_resident_first_float_images.h"
#include "group_norm_resident_first_half_images.h"
#include "group_norm_resident_half_images.h"
#include "group_norm_resident_last_bfloat16_images.h"
#include "group_norm_resident_last_float_images.h"
#include "group_norm_resident_last_half_images.h"
#include "kernels/device_kernel.h"
#include "kernels/group_norm_call.h"
#include "kernels/group_norm_launch.h"

#include <ATen/cuda/EmptyTensor.h>

#include <limits>

namespace cudnn_ops {
namespace {

constexpr int kGroupThreads = 256;
constexpr int64_t kStrip = 32;  // channels of a block that adds up

// By their pieces, one number, 8 bytes and 16: where channels are first in memory, then where they
// are last.
using Kernels = DeviceKernel[6];

// Of up to 2 pieces a thread and of more; by the pieces, one number, 4, 8 and 16 bytes: where
// channels are first in memory, then where they are last.
struct HeldKernels {
  DeviceKernel few[8], many[8];
};

// Where channels are first.
struct HeldBackwardKernels {
  DeviceKernel few[4], many[4];
};

// By their pieces, 8 bytes and 16: where channels are first in memory, then where they are last.
struct ResidentKernels {
  DeviceKernel all[4];
};

// For types of two bytes: where channels are first in memory, and last.
struct ClusterKernels {
  DeviceKernel all[2];
};

// By their pieces as above: of blocks that wait for each other, and of others.
struct ResidentBackwardKernels {
  DeviceKernel waiting[4], alone[4];
};

struct ForwardKernels {
  Kernels whole, moments, groups, apply;
};

struct BackwardKernels {
  Kernels whole, sums, gradient;
  DeviceKernel totals;
};

#define CUDNN_OPS_KERNEL(images, name) {images, "group_norm_" name, true}
#define CUDNN_OPS_WIDTHS(images, name)                                                    \
  {CUDNN_OPS_KERNEL(images, name "_n_first"),  CUDNN_OPS_KERNEL(images, name "_8_first"), \
   CUDNN_OPS_KERNEL(images, name "_16_first"), CUDNN_OPS_KERNEL(images, name "_n_last"),  \
   CUDNN_OPS_KERNEL(images, name "_8_last"),   CUDNN_OPS_KERNEL(images, name "_16_last")}
#define CUDNN_OPS_HELD_WIDTHS(images, name, order)                                      \
  CUDNN_OPS_KERNEL(images, name "_n" order), CUDNN_OPS_KERNEL(images, name "_4" order), \
      CUDNN_OPS_KERNEL(images, name "_8" order), CUDNN_OPS_KERNEL(images, name "_16" order)
#define CUDNN_OPS_HELD_ORDERS(images, name) \
  {CUDNN_OPS_HELD_WIDTHS(images, name, "_first"), CUDNN_OPS_HELD_WIDTHS(images, name, "_last")}
#define CUDNN_OPS_HELD(images) \
  {CUDNN_OPS_HELD_ORDERS(images, "few"), CUDNN_OPS_HELD_ORDERS(images, "many")}
#define CUDNN_OPS_HELD_BACKWARD(images)                    \
  {                                                        \
    {CUDNN_OPS_HELD_WIDTHS(images, "few_backward", "")}, { \
      CUDNN_OPS_HELD_WIDTHS(images, "many_backward", "")   \
    }                                                      \
  }
#define CUDNN_OPS_CLUSTER(images)                                                               \
  {                                                                                             \
    {                                                                                           \
      CUDNN_OPS_KERNEL(images, "cluster_16_first"), CUDNN_OPS_KERNEL(images, "cluster_16_last") \
    }                                                                                           \
  }
#define CUDNN_OPS_RESIDENT_KERNEL(images, name) {images, "group_norm_resident_" name, true, true}
#define CUDNN_OPS_RESIDENT(images)                                                                 \
  {                                                                                                \
    {                                                                                              \
      CUDNN_OPS_RESIDENT_KERNEL(images, "8_first"), CUDNN_OPS_RESIDENT_KERNEL(images, "16_first"), \
          CUDNN_OPS_RESIDENT_KERNEL(images, "8_last"),                                             \
          CUDNN_OPS_RESIDENT_KERNEL(images, "16_last")                                             \
    }                                                                                              \
  }
#define CUDNN_OPS_RESIDENT_ORDERS(kernel, type, name)              \
  {kernel(kGroupNormResidentFirst##type##Images, name "8_first"),  \
   kernel(kGroupNormResidentFirst##type##Images, name "16_first"), \
   kernel(kGroupNormResidentLast##type##Images, name "8_last"),    \
   kernel(kGroupNormResidentLast##type##Images, name "16_last")}
#define CUDNN_OPS_RESIDENT_BACKWARD(type)                                   \
  {CUDNN_OPS_RESIDENT_ORDERS(CUDNN_OPS_RESIDENT_KERNEL, type, "backward_"), \
   CUDNN_OPS_RESIDENT_ORDERS(CUDNN_OPS_KERNEL, type, "resident_backward_")}
#define CUDNN_OPS_FORWARD(images)                                          \
  {CUDNN_OPS_WIDTHS(images, "whole"), CUDNN_OPS_WIDTHS(images, "moments"), \
   CUDNN_OPS_WIDTHS(images, "groups"), CUDNN_OPS_WIDTHS(images, "apply")}
#define CUDNN_OPS_BACKWARD(images)                                               \
  {CUDNN_OPS_WIDTHS(images, "whole_backward"), CUDNN_OPS_WIDTHS(images, "sums"), \
   CUDNN_OPS_WIDTHS(images, "gradient"), CUDNN_OPS_KERNEL(images, "totals")}

const HeldKernels& held_kernels(int type) {
  static const HeldKernels all[3] = {CUDNN_OPS_HELD(kGroupNormHeldHalfImages),
                                     CUDNN_OPS_HELD(kGroupNormHeldBFloat16Images),
                                     CUDNN_OPS_HELD(kGroupNormHeldFloatImages)};
  return all[type];
}

const HeldBackwardKernels& held_backward_kernels(int type) {
  static const HeldBackwardKernels all[3] = {
      CUDNN_OPS_HELD_BACKWARD(kGroupNormHeldBackwardHalfImages),
      CUDNN_OPS_HELD_BACKWARD(kGroupNormHeldBackwardBFloat16Images),
      CUDNN_OPS_HELD_BACKWARD(kGroupNormHeldBackwardFloatImages)};
  return all[type];
}

const ClusterKernels& cluster_kernels(int type) {
  static const ClusterKernels all[2] = {CUDNN_OPS_CLUSTER(kGroupNormClusterHalfImages),
                                        CUDNN_OPS_CLUSTER(kGroupNormClusterBFloat16Images)};
  return all[type];
}

const ResidentKernels& resident_kernels(int type) {
  static const ResidentKernels all[3] = {CUDNN_OPS_RESIDENT(kGroupNormResidentHalfImages),
                                         CUDNN_OPS_RESIDENT(kGroupNormResidentBFloat16Images),
                                         CUDNN_OPS_RESIDENT(kGroupNormResidentFloatImages)};
  return all[type];
}

const ResidentBackwardKernels& resident_backward_kernels(int type) {
  static const ResidentBackwardKernels all[3] = {CUDNN_OPS_RESIDENT_BACKWARD(Half),
                                                 CUDNN_OPS_RESIDENT_BACKWARD(BFloat16),
                                                 CUDNN_OPS_RESIDENT_BACKWARD(Float)};
  return all[type];
}

const ForwardKernels& forward_kernels(int type) {
  static const ForwardKernels all[3] = {CUDNN_OPS_FORWARD(kGroupNormForwardHalfImages),
                                        CUDNN_OPS_FORWARD(kGroupNormForwardBFloat16Images),
                                        CUDNN_OPS_FORWARD(kGroupNormForwardFloatImages)};
  return all[type];
}

const BackwardKernels& backward_kernels(int type) {
  static const BackwardKernels all[3] = {CUDNN_OPS_BACKWARD(kGroupNormBackwardHalfImages),
                                         CUDNN_OPS_BACKWARD(kGroupNormBackwardBFloat16Images),
                                         CUDNN_OPS_BACKWARD(kGroupNormBackwardFloatImages)};
  return all[type];
}

template <class T = void>
T* data_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
}

at::Tensor dense(const std::optional<at::Tensor>& parameter) {
  return parameter ? parameter->contiguous() : at::Tensor();
}

bool is_float(const at::Tensor& parameter) {
  return parameter.defined() && parameter.scalar_type() == at::kFloat;
}

// The largest of 16, 8 and `least` bytes that all addresses are multiples of.
unsigned aligned_bytes(std::initializer_list<const void*> addresses, unsigned least) {
  uintptr_t bits = 0;
  for (const void* address : addresses) bits |= reinterpret_cast<uintptr_t>(address);
  return bits % 16 == 0 ? 16 : bits % 8 == 0 ? 8 : least;
}

// Of a problem's kernel.
size_t index_of(const GroupNormProblem& problem) {
  const size_t piece = problem.piece_bytes() == 16 ? 2 : problem.piece_bytes() == 8 ? 1 : 0;
  return (problem.is_channels_last ? 3 : 0) + piece;
}

size_t index_of(const GroupNormProblem& problem, const GroupNormHeldLaunch& launch) {
  const unsigned bytes = launch.piece_bytes;
  const size_t piece = bytes == 16 ? 3 : bytes == 8 ? 2 : bytes > problem.number_bytes ? 1 : 0;
  return (problem.is_channels_last ? 4 : 0) + piece;
}

size_t resident_index_of(const GroupNormProblem& problem) {
  return (problem.is_channels_last ? 2 : 0) + (problem.piece_bytes() == 16 ? 1 : 0);
}

// What both directions have in common.
GroupNormCall call_of(const GroupNormOfImages& args, const at::Tensor& weight,
                      const at::Tensor& bias) {
  const auto& input = args.input;
  const int64_t samples = input.size(0), channels = input.size(1);
  const int64_t positions = input.numel() / (samples * channels);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  TORCH_CHECK_VALUE(samples * channels < kMost && positions < kMost, args.op,
                    ": no more than 2^31 channels of all samples, or numbers in a channel; got ",
                    samples * channels, " of ", positions);
  GroupNormCall call{};
  call.input = data_of(input);
  call.weight = data_of(weight);
  call.bias = data_of(bias);
  call.is_weight_float = is_float(weight);
  call.is_bias_float = is_float(bias);
  call.samples = static_cast<unsigned>(samples);
  call.channels = static_cast<unsigned>(channels);
  call.groups = static_cast<unsigned>(args.groups);
  call.positions = static_cast<unsigned>(positions);
  call.eps = static_cast<float>(args.eps);
  call.has_silu = args.has_silu;
  // Of one position either order is the same, and pieces of channels are the wider ones.
  call.is_channels_last = args.is_channels_last || positions == 1;
  return call;
}

GroupNormProblem problem_of(const GroupNormCall& call, const at::Tensor& input, bool is_backward) {
  const auto number_bytes = static_cast<unsigned>(input.element_size());
  const auto aligned = aligned_bytes(
      {call.input, call.residual, call.grad_out, call.grad_sum, call.out, call.sum}, number_bytes);
  return {call.samples,
          call.channels,
          call.groups,
          call.positions,
          call.is_channels_last,
          number_bytes,
          aligned,
          is_backward,
          /*may_be_whole=*/call.out != nullptr};
}

at::Tensor allocate(int64_t floats, const at::Tensor& like) {
  return at::detail::empty_cuda({floats}, at::kFloat, like.device(), std::nullopt);
}

// Two numbers of each channel, or group, for each stretch of positions.
int64_t partial_numbers(const GroupNormCall& call, int64_t parts) {
  return int64_t{2} * call.samples * call.spread.stretches * parts;
}

}  // namespace

void group_norm_forward(const GroupNormOfImages& args, const at::Tensor& residual,
                        const at::Tensor& out, const at::Tensor& sum, const at::Tensor& mean,
                        const at::Tensor& rstd) {
  const at::Tensor weight = dense(args.weight), bias = dense(args.bias);
  GroupNormCall call = call_of(args, weight, bias);
  call.residual = data_of(residual);
  call.out = data_of(out);
  call.sum = data_of(sum);
  call.mean = data_of<float>(mean);
  call.rstd = data_of<float>(rstd);
  const GroupNormProblem problem = problem_of(call, args.input, /*is_backward=*/false);
  const DeviceLimits limits = current_limits();
  const int type = type_index(args.input.scalar_type());
  void* argument = &call;
  if (const auto cluster = residual.defined() ? std::nullopt : cluster_launch(problem, limits)) {
    call.spread = cluster->spread;
    return cluster_kernels(type).all[problem.is_channels_last].launch(
        cluster->blocks, 1, cluster->threads, &argument, static_cast<int>(cluster->shared_bytes),
        static_cast<int>(call.spread.stretches));
  }
  if (const auto held = held_launch(problem, limits)) {
    call.hold = held->hold;
    const HeldKernels& all = held_kernels(type);
    return (held->has_many ? all.many : all.few)[index_of(problem, *held)].launch(
        held->blocks, 1, held->threads, &argument, static_cast<int>(held->shared_bytes));
  }
  if (const auto resident = resident_launch(problem, limits)) {
    call.spread = resident->spread;
    const at::Tensor memory = allocate(partial_numbers(call, problem.groups), args.input);
    call.partial = data_of<float>(memory);
    const size_t index = resident_index_of(problem);
    return resident_kernels(type).all[index].launch(resident->blocks, 1, resident->threads,
                                                    &argument,
                                                    static_cast<int>(resident->shared_bytes));
  }
  const GroupNormLaunch launch = group_norm_launch(problem, limits);
  call.spread = launch.spread;
  const auto& kernels = forward_kernels(type);
  const size_t index = index_of(problem);
  const auto shared = static_cast<int>(launch.shared_bytes);
  if (launch.is_whole) {
    return kernels.whole[index].launch(launch.blocks, 1, launch.threads, &argument, shared);
  }
  const int64_t parts = call.spread.has_groups ? problem.groups : problem.channels;
  const int64_t numbers = partial_numbers(call, parts), groups = problem.samples * problem.groups;
  const bool has_stats = call.mean != nullptr;
  const at::Tensor memory = allocate(numbers + (has_stats ? 0 : 2 * groups), args.input);
  call.partial = data_of<float>(memory);
  if (!has_stats) {
    call.mean = call.partial + numbers;
    call.rstd = call.mean + groups;
  }
  kernels.moments[index].launch(launch.blocks, 1, launch.threads, &argument, shared);
  kernels.groups[index].launch(groups, 1, kGroupThreads, &argument);
  kernels.apply[index].launch(launch.blocks, 1, launch.threads, &argument, shared);
}

void group_norm_backward(const GroupNormOfImages& args, const at::Tensor& grad_out,
                         const at::Tensor& grad_sum, const at::Tensor& mean, const at::Tensor& rstd,
                         const at::Tensor& grad_input, const at::Tensor& grad_weight,
                         const at::Tensor& grad_bias) {
  const at::Tensor weight = dense(args.weight), bias = dense(args.bias);
  GroupNormCall call = call_of(args, weight, bias);
  call.grad_out = data_of(grad_out);
  call.grad_sum = data_of(grad_sum);
  call.out = data_of(grad_input);
  call.mean = data_of<float>(mean);
  call.rstd = data_of<float>(rstd);
  call.grad_weight = data_of(grad_weight);
  call.grad_bias = data_of(grad_bias);
  const GroupNormProblem problem = problem_of(call, args.input, /*is_backward=*/true);
  const DeviceLimits limits = current_limits();
  const int type = type_index(args.input.scalar_type());
  const auto& kernels = backward_kernels(type);
  const bool needs_input = call.out != nullptr;
  const bool needs_totals = call.grad_weight != nullptr || call.grad_bias != nullptr;
  const int64_t strips = needs_totals ? 2 * divide_up(problem.channels, kStrip) : 0;
  void* argument = &call;
  if (const auto held = held_launch(problem, limits)) {
    call.hold = held->hold;
    call.spread.stretches = 1;
    at::Tensor memory;
    if (needs_totals) memory = allocate(partial_numbers(call, problem.channels), args.input);
    call.partial = data_of<float>(memory);
    const HeldBackwardKernels& all = held_backward_kernels(type);
    (held->has_many ? all.many : all.few)[index_of(problem, *held)].launch(
        held->blocks, 1, held->threads, &argument, static_cast<int>(held->shared_bytes));
    if (needs_totals) kernels.totals.launch(strips, 1, kGroupThreads, &argument);
    return;
  }
  if (const auto resident = resident_launch(problem, limits)) {
    call.spread = resident->spread;
    const bool waits = call.spread.stretches > 1;
    const int64_t of_groups = partial_numbers(call, problem.groups);
    const int64_t numbers = needs_totals ? partial_numbers(call, problem.channels) : 0;
    const at::Tensor memory = allocate(of_groups + numbers, args.input);
    call.group_partial = data_of<float>(memory);
    call.partial = needs_totals ? call.group_partial + of_groups : nullptr;
    const ResidentBackwardKernels& all = resident_backward_kernels(type);
    (waits ? all.waiting : all.alone)[resident_index_of(problem)].launch(
        resident->blocks, 1, resident->threads, &argument,
        static_cast<int>(resident->shared_bytes));
    if (needs_totals && !waits) kernels.totals.launch(strips, 1, kGroupThreads, &argument);
    return;
  }
  const GroupNormLaunch launch = group_norm_launch(problem, limits);
  call.spread = launch.spread;
  const size_t index = index_of(problem);
  const auto shared = static_cast<int>(launch.shared_bytes);
  const int64_t groups = problem.samples * problem.groups;
  // Sums of channels where they are asked for, or no sums of groups are made of them.
  const bool has_groups = !launch.is_whole && call.spread.has_groups && needs_input;
  const bool needs_channels = needs_totals || !(launch.is_whole || has_groups);
  const int64_t numbers = needs_channels ? partial_numbers(call, problem.channels) : 0;
  const int64_t of_groups = has_groups ? partial_numbers(call, problem.groups) : 0;
  const at::Tensor memory = allocate(2 * groups + of_groups + numbers, args.input);
  call.slopes = data_of<float>(memory);
  call.group_partial = has_groups ? call.slopes + 2 * groups : nullptr;
  call.partial = needs_channels ? call.slopes + 2 * groups + of_groups : nullptr;
  if (launch.is_whole) {
    kernels.whole[index].launch(launch.blocks, 1, launch.threads, &argument, shared);
    if (needs_totals) kernels.totals.launch(strips, 1, kGroupThreads, &argument);
    return;
  }
  kernels.sums[index].launch(launch.blocks, 1, launch.threads, &argument, shared);
  kernels.totals.launch(strips + (needs_input ? groups : 0), 1, kGroupThreads, &argument);
  if (!needs_input) return;
  kernels.gradient[index].launch(launch.blocks, 1, launch.threads, &argument, shared);
}

}  // namespace cudnn_ops
