// The gradients of group norm. Compiled when the package is built (cmake/compile_kernels.py), once
// for each type of the numbers; group_norm_cuda.cpp launches it.
//
// Of each channel of a sample two sums are needed: of the gradient through the activation, and of
// that times the normed number. Over samples they are the gradients of bias and weight; over the
// channels of a group, each times its weight, they are what the gradient of the input is less by.
// As in the forward, one kernel does all of a group that fits into shared memory, else three do;
// group_norm_held_backward.cu has those that stay in registers, and
// group_norm_resident_backward.cuh tells of those that are kept by blocks which run at the same
// time.

#include "group_norm_sums.cuh"

namespace {

// Pieces of each tensor that a thread has under way. Of one channel it has few other numbers, and
// registers for more.
template <bool kIsLast>
constexpr int kAhead = kIsLast ? 2 : 4;

// What a thread knows of its channels.
template <int kBytes, bool kIsLast>
struct Channels {
  static constexpr int kWidth = kBytes / sizeof(Bits), kChannels = kIsLast ? kWidth : 1;
  float centers[kChannels], factors[kChannels], shifts[kChannels];

  __device__ Channels(const GroupNormCall& call, const Tile<kBytes, kIsLast>& tile,
                      unsigned channel) {
    const unsigned first = tile.sample * call.groups;
    tile.each_channel(channel, [&](int k, unsigned of, unsigned group) {
      centers[k] = call.mean[first + group];
      factors[k] = call.rstd[first + group] * weight_of(call, of);
      shifts[k] = call.has_silu ? bias_of(call, of) : 0;
    });
  }
  // Makes a number's distance from the mean of it, and of the output's gradient the one through the
  // activation.
  __device__ void through(const GroupNormCall& call, float (&x)[kWidth],
                          float (&grad)[kWidth]) const {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) x[k] -= centers[kIsLast ? k : 0];
    if (!call.has_silu) return;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const int c = kIsLast ? k : 0;
      grad[k] *= SiluOf<Type::kDigits>::of(fmaf(x[k], factors[c], shifts[c])).y;
    }
  }
};

// The sums of each of the block's channels; `write` gets them.
template <bool kKeeps, int kBytes, bool kIsLast, class Write>
__device__ void find_sums(const GroupNormCall& call, const Tile<kBytes, kIsLast>& tile,
                          const Shared& shared, const Write& write) {
  using Vector = typename Tile<kBytes, kIsLast>::Vector;
  constexpr int kWidth = Tile<kBytes, kIsLast>::kWidth;
  constexpr int kChannels = Tile<kBytes, kIsLast>::kChannels;
  const auto *input = (const Vector*)call.input, *grad_out = (const Vector*)call.grad_out;
  const auto* kept = (const Vector*)shared.kept + threadIdx.x;
  for (unsigned turn = 0; turn < call.spread.turns; ++turn) {
    const unsigned channel = tile.channel(turn);
    Sums sums[kChannels] = {};
    if (tile.has(channel)) {
      const Channels<kBytes, kIsLast> channels(call, tile, channel);
      Vector inputs[kAhead<kIsLast>], grads[kAhead<kIsLast>];
      const auto load = [&](int i, long long at) {
        inputs[i] = kKeeps ? kept[0] : input[at];
        grads[i] = kKeeps ? kept[blockDim.x] : grad_out[at];
        if constexpr (kKeeps) kept += 2 * blockDim.x;
      };
      const auto use = [&](int i, long long at) {
        float x[kWidth], grad[kWidth];
        inputs[i].read(x);
        grads[i].read(grad);
        channels.through(call, x, grad);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          Sums& own = sums[kIsLast ? k : 0];
          own.floats[0] += grad[k];
          own.floats[1] = fmaf(grad[k], x[k], own.floats[1]);
        }
      };
      tile.template each<kAhead<kIsLast>>(channel, load, use);
    }
    join<kIsLast>(call, tile.lane, sums, shared.scratch);
    if (tile.lane != 0 || !tile.has(channel)) continue;
    tile.each_channel(channel, [&](int k, unsigned of, unsigned group) {
      sums[k].floats[1] *= call.rstd[tile.sample * call.groups + group];
      write(of, sums[k]);
    });
  }
}

// The gradient of the block's numbers; `slopes` are those of groups from `first_group` on.
template <bool kKeeps, int kBytes, bool kIsLast>
__device__ void write_gradient(const GroupNormCall& call, const Tile<kBytes, kIsLast>& tile,
                               const Shared& shared, const float2* slopes, unsigned first_group) {
  using Vector = typename Tile<kBytes, kIsLast>::Vector;
  constexpr int kWidth = Tile<kBytes, kIsLast>::kWidth;
  constexpr int kChannels = Tile<kBytes, kIsLast>::kChannels;
  const auto *input = (const Vector*)call.input, *grad_out = (const Vector*)call.grad_out;
  const auto* more = (const Vector*)call.grad_sum;
  const auto* kept = (const Vector*)shared.kept + threadIdx.x;
  for (unsigned turn = 0; turn < call.spread.turns; ++turn) {
    const unsigned channel = tile.channel(turn);
    if (!tile.has(channel)) continue;
    const Channels<kBytes, kIsLast> channels(call, tile, channel);
    float constants[kChannels], multiples[kChannels];
    tile.each_channel(channel, [&](int k, unsigned, unsigned group) {
      const float2 slope = slopes[group - first_group];
      constants[k] = slope.x;
      multiples[k] = slope.y;
    });
    Vector inputs[kAhead<kIsLast>], grads[kAhead<kIsLast>];
    const auto load = [&](int i, long long at) {
      if constexpr (kKeeps) {
        inputs[i] = kept[0];
        grads[i] = kept[blockDim.x];
        kept += 2 * blockDim.x;
      } else {
        inputs[i] = input[at];
        grads[i] = grad_out[at];
      }
    };
    const auto use = [&](int i, long long at) {
      float x[kWidth], grad[kWidth];
      inputs[i].read(x);
      grads[i].read(grad);
      channels.through(call, x, grad);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const int c = kIsLast ? k : 0;
        const float less = fmaf(x[k], multiples[c], constants[c]);
        x[k] = fmaf(channels.factors[c], grad[k], -less);
      }
      if (more != nullptr) more[at].add_to(x);
      ((Vector*)call.out)[at] = Vector::of(x);
    };
    tile.template each<kAhead<kIsLast>>(channel, load, use);
  }
}

// The sums of each of the block's groups over its channels, each times its weight; `write` gets the
// group's number in the block and both. The channels' go to `partial`, where there is one. Every
// thread of the block must come here.
template <bool kKeeps, int kBytes, bool kIsLast, class Write>
__device__ void find_group_sums(const GroupNormCall& call, const Tile<kBytes, kIsLast>& tile,
                                const Shared& shared, const Write& write) {
  const long long numbers = (long long)call.samples * call.spread.stretches * call.channels;
  auto* found = (float2*)shared.channels;
  find_sums<kKeeps>(call, tile, shared, [&](unsigned channel, const Sums& sums) {
    found[channel - tile.first_channel] = {sums.floats[0], sums.floats[1]};
    if (call.partial == nullptr) return;
    float* partial = call.partial + (long long)tile.row * call.channels + channel;
    partial[0] = sums.floats[0];
    partial[numbers] = sums.floats[1];
  });
  __syncthreads();
  const unsigned group_channels = call.channels / call.groups;
  const unsigned groups = (tile.end_channel - tile.first_channel) / group_channels;
  add_up_groups(call, found, tile.first_channel, groups, write);
}

// Groups of a sample that are a block's, from the first number to the gradient, but for the sums
// over samples.
template <int kBytes, bool kIsLast>
__device__ void whole_backward(const GroupNormCall& call) {
  const Tile<kBytes, kIsLast> tile(call, blockIdx.x);
  const Shared shared(call.spread);
  const unsigned first_group = tile.first_channel / (call.channels / call.groups);
  auto* slopes = (float2*)shared.groups;
  keep(call, tile, shared, call.input, call.grad_out);
  find_group_sums<true>(call, tile, shared, [&](unsigned group, float sum, float along) {
    slopes[group] = slopes_of(call, tile.sample * call.groups + first_group + group, sum, along);
  });
  __syncthreads();
  write_gradient<true>(call, tile, shared, slopes, first_group);
}

template <int kBytes, bool kIsLast>
__device__ void sums(const GroupNormCall& call) {
  const Tile<kBytes, kIsLast> tile(call, blockIdx.x);
  const Shared shared(call.spread);
  if (call.group_partial != nullptr) {
    const unsigned first_group = tile.first_channel / (call.channels / call.groups);
    auto* partial = (float2*)call.group_partial + (long long)tile.row * call.groups + first_group;
    find_group_sums<false>(call, tile, shared, [&](unsigned group, float sum, float along) {
      partial[group] = {sum, along};
    });
    return;
  }
  const long long numbers = (long long)call.samples * call.spread.stretches * call.channels;
  float* partial = call.partial + (long long)tile.row * call.channels;
  find_sums<false>(call, tile, shared, [&](unsigned channel, const Sums& sums) {
    partial[channel] = sums.floats[0];
    partial[numbers + channel] = sums.floats[1];
  });
}

// The gradients of weight and bias by the first blocks, 32 channels of one of them each; by each of
// the others the slopes of a group.
__device__ void totals(const GroupNormCall& call) {
  const unsigned strips = strips_of_totals(call);
  if (blockIdx.x < 2 * strips) return add_up_totals(call, blockIdx.x);
  __shared__ float scratch[2][32];
  const unsigned at = blockIdx.x - 2 * strips, sample = at / call.groups;
  const unsigned group = at - sample * call.groups, group_channels = call.channels / call.groups;
  const long long numbers = (long long)call.samples * call.spread.stretches * call.channels;
  const float* partial = call.partial + (long long)sample * call.spread.stretches * call.channels +
                         (long long)group * group_channels;
  float found[2] = {};
  if (call.group_partial != nullptr) {
    const auto* sums = (const float2*)call.group_partial +
                       (long long)sample * call.spread.stretches * call.groups + group;
    for (unsigned row = threadIdx.x; row < call.spread.stretches; row += blockDim.x) {
      const float2 here = sums[(long long)row * call.groups];
      found[0] += here.x;
      found[1] += here.y;
    }
  }
  const unsigned parts = call.group_partial != nullptr ? 0 : call.spread.stretches * group_channels;
#pragma unroll 4
  for (unsigned i = threadIdx.x; i < parts; i += blockDim.x) {
    const unsigned row = i / group_channels, channel = i - row * group_channels;
    const float* here = partial + (long long)row * call.channels + channel;
    const float weight = weight_of(call, group * group_channels + channel);
    found[0] = fmaf(weight, here[0], found[0]);
    found[1] = fmaf(weight, here[numbers], found[1]);
  }
  sum_up(found, blockDim.x, scratch);
  if (threadIdx.x == 0) ((float2*)call.slopes)[at] = slopes_of(call, at, found[0], found[1]);
}

template <int kBytes, bool kIsLast>
__device__ void gradient(const GroupNormCall& call) {
  const Tile<kBytes, kIsLast> tile(call, gridDim.x - 1 - blockIdx.x);
  const auto* slopes = (const float2*)call.slopes + tile.sample * call.groups;
  write_gradient<false>(call, tile, Shared(call.spread), slopes, 0);
}

}  // namespace

GROUP_NORM(whole_backward, 16, 512, 1)
GROUP_NORM(whole_backward, 8, 512, 1)
GROUP_NORM(whole_backward, n, 512, 1)
GROUP_NORM(sums, 16, 256, 2)
GROUP_NORM(sums, 8, 256, 2)
GROUP_NORM(sums, n, 256, 2)
GROUP_NORM(gradient, 16, 256, 2)
GROUP_NORM(gradient, 8, 256, 2)
GROUP_NORM(gradient, n, 256, 2)

GROUP_NORM_KERNEL(totals, 256, 1, totals)
