// The gradients of group norm by blocks that keep parts of samples, where channels are last in
// memory (group_norm_resident_backward.cuh). Compiled as group_norm_backward.cu is.

#include "group_norm_resident_backward.cuh"

namespace {

template <int kBytes>
using Pairs = Part<kBytes, true, 2>;

// Calls `visit` with the index of each of the thread's channels and its group in the sample.
template <int kBytes, class Visit>
__device__ void each_group(const Pairs<kBytes>& part, const Visit& visit) {
  const unsigned group_channels = part.group_channels(), last = part.call.groups - 1;
  unsigned group = part.channel() / group_channels;
  unsigned left = (group + 1) * group_channels - part.channel();
#pragma unroll
  for (int k = 0; k < Pairs<kBytes>::kWidth; ++k) {
    visit(k, group);
    if (--left > 0) continue;
    left = group_channels;
    group = min(group + 1, last);  // the last one is not behind the last channel
  }
}

// What the thread's channels are multiplied by and what is added, with the mean in between; both
// times what SiLU's argument comes multiplied by, where there is one.
template <int kBytes>
struct Channels {
  static constexpr int kWidth = Pairs<kBytes>::kWidth;
  float centers[kWidth], factors[kWidth], shifts[kWidth];

  __device__ Channels(const GroupNormCall& call, const Pairs<kBytes>& part) {
    read_parameters(call.weight, call.is_weight_float, part.channel(), 1, factors);
    read_parameters(call.bias, call.is_bias_float, part.channel(), 0, shifts);
    const unsigned first = part.unit * call.groups;
    const float scale = scale_of(call);
    each_group(part, [&](int k, unsigned group) {
      centers[k] = call.mean[first + group];
      factors[k] *= call.rstd[first + group] * scale;
      shifts[k] *= scale;
    });
  }
  // Makes a number's distance from the mean of it, and of the output's gradient the one through the
  // activation, over what the factor comes multiplied by.
  template <bool kHasSilu>
  __device__ void through(float (&x)[kWidth], float (&grad)[kWidth]) const {
    float arguments[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      x[k] -= centers[k];
      arguments[k] = fmaf(x[k], factors[k], shifts[k]);
    }
    if constexpr (kHasSilu) Silus::apply_slopes(arguments, grad);
  }
};

// The sums of the thread's channels in its pieces.
template <bool kStreams, bool kHasSilu, int kBytes>
__device__ void find_sums(const GroupNormCall& call, const Pairs<kBytes>& part,
                          const Channels<kBytes>& channels, Sums (&sums)[Pairs<kBytes>::kWidth]) {
  using Vector = typename Pairs<kBytes>::Vector;
  constexpr int kWidth = Pairs<kBytes>::kWidth;
  const auto use = [&](unsigned i, const Vector* own) {
    if (!part.has(i)) return;
    float x[kWidth], grad[kWidth];
    own[0].read(x);
    own[blockDim.x].read(grad);
    channels.template through<kHasSilu>(x, grad);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      sums[k].floats[0] += grad[k];
      sums[k].floats[1] = fmaf(grad[k], x[k], sums[k].floats[1]);
    }
  };
  read_all<kStreams>(part, {call.input, call.grad_out}, [](const Vector*) {}, use);
}

// The sums of the part's channels and of its groups, which other blocks read.
template <int kBytes>
__device__ void write_sums(const GroupNormCall& call, const Pairs<kBytes>& part, const Room& room,
                           Sums (&sums)[Pairs<kBytes>::kWidth]) {
  const unsigned lane = threadIdx.x / call.spread.slots;
  join<true>(call, lane, sums, room.scratch);
  if (lane == 0) {
    const long long numbers = (long long)gridDim.x * call.channels;
    const unsigned first = part.unit * call.groups, channel = part.channel();
    const float scale = scale_of(call);
    float* partial = call.partial + (long long)blockIdx.x * call.channels + channel;
    each_group(part, [&](int k, unsigned group) {
      const float sum = sums[k].floats[0] * scale;
      const float along = sums[k].floats[1] * scale * call.rstd[first + group];
      room.channels[channel + k] = {sum, along};
      if (call.partial == nullptr) return;
      partial[k] = sum;
      partial[numbers + k] = along;
    });
  }
  __syncthreads();
  auto* of_groups = (float2*)call.group_partial + (long long)blockIdx.x * call.groups;
  add_up_groups(call, room.channels, 0, call.groups,
                [&](unsigned group, float sum, float along) { of_groups[group] = {sum, along}; });
}

template <bool kHasSilu, int kBytes>
__device__ void write_gradient(const GroupNormCall& call, const Pairs<kBytes>& part,
                               const Room& room, const Channels<kBytes>& channels) {
  using Vector = typename Pairs<kBytes>::Vector;
  constexpr int kWidth = Pairs<kBytes>::kWidth;
  const auto* more = (const Vector*)call.grad_sum;
  const bool streams = call.spread.streams;
  float constants[kWidth], multiples[kWidth];
  each_group(part, [&](int k, unsigned group) {
    const float2 slope = room.slopes[group];
    constants[k] = slope.x;
    multiples[k] = slope.y;
  });
  read_back(part, {call.input, call.grad_out}, [&](unsigned i, const Vector* own) {
    const long long at = part.offset(i);
    float x[kWidth], grad[kWidth];
    own[0].read(x);
    own[blockDim.x].read(grad);
    Vector added;
    if (more != nullptr) added = more[at];
    channels.template through<kHasSilu>(x, grad);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      x[k] = fmaf(channels.factors[k], grad[k], -fmaf(x[k], multiples[k], constants[k]));
    }
    if (more != nullptr) added.add_to(x);
    Vector* to = (Vector*)call.out + at;
    if (streams) {
      store_once(to, Vector::of(x));
    } else {
      *to = Vector::of(x);
    }
  });
}

template <bool kHasSilu, int kBytes>
__device__ void resident_backward(const GroupNormCall& call) {
  const Pairs<kBytes> part(call);
  const Room room(call, call.channels, call.groups);
  const Channels<kBytes> channels(call, part);
  {
    Sums sums[Pairs<kBytes>::kWidth] = {};
    if (call.spread.streams) {
      find_sums<true, kHasSilu>(call, part, channels, sums);
    } else {
      find_sums<false, kHasSilu>(call, part, channels, sums);
    }
    write_sums(call, part, room, sums);
  }
  join_parts(call, part.unit, call.groups, room.slopes);
  write_gradient<kHasSilu>(call, part, room, channels);
  add_up_totals(call);
}

template <int kBytes>
__device__ void resident_backward(const GroupNormCall& call) {
  if (call.has_silu) return resident_backward<true, kBytes>(call);
  resident_backward<false, kBytes>(call);
}

}  // namespace

GROUP_NORM_RESIDENT_BACKWARD(16, last, 512)
GROUP_NORM_RESIDENT_BACKWARD(8, last, 512)
