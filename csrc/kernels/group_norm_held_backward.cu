// The gradients of group norm of groups that stay in registers, where channels are first in memory:
// each number is read once. Which sums there are is told in group_norm_backward.cu, which has the
// kernels of all other groups.
//
// Pieces may have numbers of two channels, so that each has two parts, whose sums are written to
// shared memory; those of a channel are added up there in a fixed order.

#include "group_norm_held.cuh"
#include "mean.cuh"

namespace {

// Sums of a piece's first channel, and of its second: of the gradient through the activation, and
// of that times the distance from the mean.
struct alignas(16) PartSums {
  float2 of[2];
};

// A block's shared memory: of the pieces, the channels and the groups that it has.
struct HeldSums {
  PartSums* pieces;
  float2 *parameters, *channels, *slopes;

  __device__ HeldSums(const GroupNormHold& hold, unsigned channels_in_all) {
    extern __shared__ uint4 memory[];
    pieces = (PartSums*)memory;
    parameters = (float2*)(pieces + hold.groups * hold.vectors);
    channels = parameters + channels_in_all;
    slopes = channels + channels_in_all;
  }
};

// Makes a number's distance from the mean of it, and of the output's gradient the one through the
// activation.
template <bool kIsSplit, int kWidth>
__device__ void through(const GroupNormCall& call, const HeldPiece<kIsSplit>& of, float mean,
                        float (&x)[kWidth], float (&grad)[kWidth]) {
#pragma unroll
  for (int k = 0; k < kWidth; ++k) x[k] -= mean;
  if (!call.has_silu) return;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    grad[k] *= SiluOf<Type::kDigits>::of(fmaf(x[k], of.factor(k), of.shift(k))).y;
  }
}

template <bool kIsSplit, int kVectors, int kBytes, class Vector>
__device__ void find_parts(const GroupNormCall& call, const HeldGroup<kBytes, false>& group,
                           const HeldSums& sums, const float2* parameters, float mean, float rstd,
                           const Vector (&inputs)[kVectors], const Vector (&grads)[kVectors]) {
  constexpr int kWidth = HeldGroup<kBytes, false>::kWidth;
  group.template each<kVectors>([&](int v, unsigned piece) {
    const HeldPiece<kIsSplit> of(call, group, piece, parameters, rstd);
    float x[kWidth], grad[kWidth];
    inputs[v].read(x);
    grads[v].read(grad);
    through(call, of, mean, x, grad);
    PartSums parts = {};
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      if (of.is_next(k)) {
        parts.of[1].x += grad[k];
        parts.of[1].y = fmaf(grad[k], x[k], parts.of[1].y);
      } else {
        parts.of[0].x += grad[k];
        parts.of[0].y = fmaf(grad[k], x[k], parts.of[0].y);
      }
    }
    sums.pieces[group.member * group.hold.vectors + piece] = parts;
  });
}

// The sums of the block's channels, from those of pieces; to `partial` too, where there is one.
template <int kWidth>
__device__ void add_up_channels(const GroupNormCall& call, const HeldSums& sums,
                                unsigned channels_in_all) {
  const unsigned group_channels = call.channels / call.groups;
  const long long numbers = (long long)call.samples * call.channels;
  const long long begin = (long long)blockIdx.x * channels_in_all;  // of all samples' channels
  const unsigned threads = group_threads(channels_in_all), lane = threadIdx.x % threads;
  for (unsigned first = 0; first < channels_in_all; first += blockDim.x / threads) {
    const unsigned channel = first + threadIdx.x / threads, member = channel / group_channels;
    const bool is_there = channel < channels_in_all && begin + channel < numbers;
    const PartSums* pieces = sums.pieces + member * call.hold.vectors;
    const unsigned start = (channel - member * group_channels) * call.positions;
    const unsigned end = is_there ? (start + call.positions + kWidth - 1) / kWidth : 0;
    float2 found = {};
#pragma unroll 2
    for (unsigned piece = start / kWidth + lane; piece < end; piece += threads) {
      const float2 part = pieces[piece].of[piece * kWidth < start ? 1 : 0];
      found.x += part.x;
      found.y += part.y;
    }
    found.x = sum_within_warp(found.x, threads);
    found.y = sum_within_warp(found.y, threads);
    if (lane > 0 || !is_there) continue;
    found.y *= call.rstd[blockIdx.x * call.hold.groups + member];
    sums.channels[channel] = found;
    if (call.partial == nullptr) continue;
    call.partial[begin + channel] = found.x;
    call.partial[numbers + begin + channel] = found.y;
  }
}

// The slopes of the block's groups, from their channels' sums.
__device__ void add_up_groups(const GroupNormCall& call, const HeldSums& sums) {
  const unsigned group_channels = call.channels / call.groups, groups = call.hold.groups;
  const unsigned threads = group_threads(groups), lane = threadIdx.x % threads;
  for (unsigned first = 0; first < groups; first += blockDim.x / threads) {
    const unsigned member = first + threadIdx.x / threads;
    const unsigned group = blockIdx.x * groups + member;
    const bool is_there = member < groups && group < call.samples * call.groups;
    float sum = 0, along = 0;
    for (unsigned i = lane; i < group_channels && is_there; i += threads) {
      const unsigned channel = member * group_channels + i;
      sum = fmaf(sums.parameters[channel].x, sums.channels[channel].x, sum);
      along = fmaf(sums.parameters[channel].x, sums.channels[channel].y, along);
    }
    sum = sum_within_warp(sum, threads);
    along = sum_within_warp(along, threads);
    if (lane == 0 && is_there) sums.slopes[member] = slopes_of(call, group, sum, along);
  }
}

template <bool kIsSplit, int kVectors, int kBytes, class Vector>
__device__ void write_gradient(const GroupNormCall& call, const HeldGroup<kBytes, false>& group,
                               const float2* parameters, float2 slope, float mean, float rstd,
                               const Vector (&inputs)[kVectors], const Vector (&grads)[kVectors]) {
  constexpr int kWidth = HeldGroup<kBytes, false>::kWidth;
  group.template each<kVectors>([&](int v, unsigned piece) {
    const HeldPiece<kIsSplit> of(call, group, piece, parameters, rstd);
    float x[kWidth], grad[kWidth];
    inputs[v].read(x);
    grads[v].read(grad);
    through(call, of, mean, x, grad);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      x[k] = fmaf(of.factor(k), grad[k], -fmaf(x[k], slope.y, slope.x));
    }
    const long long at = group.offset(piece);
    if (call.grad_sum != nullptr) ((const Vector*)call.grad_sum)[at].add_to(x);
    ((Vector*)call.out)[at] = Vector::of(x);
  });
}

template <bool kIsSplit, int kBytes, int kVectors>
__device__ void held_backward(const GroupNormCall& call) {
  using Group = HeldGroup<kBytes, false>;
  using Vector = typename Group::Vector;
  const Group group(call);
  const unsigned group_channels = call.channels / call.groups;
  const unsigned channels_in_all = call.hold.groups * group_channels;
  const HeldSums sums(call.hold, channels_in_all);
  Vector inputs[kVectors], grads[kVectors];
  group.template each<kVectors>([&](int v, unsigned piece) {
    inputs[v] = ((const Vector*)call.input)[group.offset(piece)];
    grads[v] = ((const Vector*)call.grad_out)[group.offset(piece)];
  });
  const bool is_there = group.vectors > 0;
  const float mean = is_there ? call.mean[group.group] : 0;
  const float rstd = is_there ? call.rstd[group.group] : 0;
  read_parameters(call, sums.parameters);
  __syncthreads();
  const float2* parameters = sums.parameters + group.member * group_channels;
  find_parts<kIsSplit>(call, group, sums, parameters, mean, rstd, inputs, grads);
  stay_packed(inputs);
  stay_packed(grads);
  __syncthreads();
  add_up_channels<Group::kWidth>(call, sums, channels_in_all);
  __syncthreads();
  add_up_groups(call, sums);
  __syncthreads();
  const float2 slope = is_there ? sums.slopes[group.member] : float2{};
  write_gradient<kIsSplit>(call, group, parameters, slope, mean, rstd, inputs, grads);
}

// By whether pieces may have two channels.
template <int kBytes, int kVectors>
__device__ void held_backward(const GroupNormCall& call) {
  if (call.hold.is_split) return held_backward<true, kBytes, kVectors>(call);
  held_backward<false, kBytes, kVectors>(call);
}

}  // namespace

#define GROUP_NORM_HELD_BACKWARD(bytes, threads, blocks)                            \
  GROUP_NORM_KERNEL(few_backward_##bytes, threads, blocks, held_backward<bytes, 2>) \
  GROUP_NORM_KERNEL(many_backward_##bytes, threads, blocks, held_backward<bytes, 4>)

GROUP_NORM_HELD_BACKWARD(16, 1024, 1)
GROUP_NORM_HELD_BACKWARD(8, 640, 2)
GROUP_NORM_HELD_BACKWARD(4, 640, 2)
GROUP_NORM_HELD_BACKWARD(n, 640, 2)
