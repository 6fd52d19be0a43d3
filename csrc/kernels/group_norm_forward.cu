// Group norm, and the sum and activation that it comes with. Compiled when the package is built
// (cmake/compile_kernels.py), once for each type of the numbers; group_norm_cuda.cpp launches it.
//
// Where some groups of a sample fit into a block's shared memory, one kernel reads them once. Else
// one finds mean and deviation of each channel in each stretch of positions, a small one those of
// the groups, and a third reads everything again, the last stretches first: these may still be in
// the L2 cache.

#include "group_norm.cuh"

namespace {

// Mean, sum of the squared distances from it, and count of some numbers (Welford; Chan, Golub and
// LeVeque for two of them). Equal numbers are their own mean, exactly.
struct Moments {
  float floats[3];

  __device__ void take(const Moments& other) {
    if (other.floats[2] == 0) return;
    const float count = floats[2] + other.floats[2];
    const float share = other.floats[2] / count, distance = other.floats[0] - floats[0];
    floats[0] += distance * share;
    // In this order nothing overflows where one of the counts is 0.
    floats[1] += other.floats[1] + distance * floats[2] * (distance * share);
    floats[2] = count;
  }
};

constexpr int kAhead = 4;

// The moments of each of the block's channels; `write` gets them. Pieces are of the sum where there
// is a residual: the norm is of what is written.
template <int kBytes, bool kKeeps, class Write>
__device__ void find_moments(const GroupNormCall& call, const Tile<kBytes>& tile,
                             const Shared& shared, const Write& write) {
  constexpr int kWidth = kBytes / sizeof(Bits);
  using Vector = Piece<Type, kWidth>;
  const auto *input = (const Vector*)call.input, *residual = (const Vector*)call.residual;
  auto *sum = (Vector*)call.sum, *kept = (Vector*)shared.kept + threadIdx.x;
  for (unsigned turn = 0; turn < call.spread.turns; ++turn) {
    const unsigned channel = tile.channel(turn);
    float count = 0, mean[kWidth] = {}, squares[kWidth] = {};
    if (tile.has(channel)) {
      Vector pieces[kAhead];
      const auto load = [&](int i, long long at) {
        pieces[i] = input[at];
        if (residual == nullptr) return;
        float values[kWidth];
        pieces[i].read(values);
        residual[at].add_to(values);
        pieces[i] = Vector::of(values);
      };
      // Nothing is stored before all is loaded: no load would be moved over that.
      const auto use = [&](int i, long long at) {
        float values[kWidth];
        if (residual != nullptr) sum[at] = pieces[i];
        if constexpr (kKeeps) {
          *kept = pieces[i];
          kept += blockDim.x;
        }
        pieces[i].read(values);
        count += 1;
        const float share = 1 / count;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          const float distance = values[k] - mean[k];
          mean[k] = fmaf(distance, share, mean[k]);
          squares[k] = fmaf(distance, values[k] - mean[k], squares[k]);
        }
      };
      tile.template each<kAhead>(channel, load, use);
    }
    Moments moments[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) moments[k] = {{mean[k], squares[k], count}};
    join(call, tile.lane, moments, shared.scratch);
    if (tile.lane != 0 || !tile.has(channel)) continue;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      if (k == 0 || call.is_channels_last) write(channel + k, moments[k]);
    }
  }
}

// The norm of the block's numbers; `mean` and `rstd` are those of groups from `first_group` on.
template <int kBytes, bool kKeeps>
__device__ void normalize(const GroupNormCall& call, const Tile<kBytes>& tile, const Shared& shared,
                          const float* mean, const float* rstd, unsigned first_group) {
  constexpr int kWidth = kBytes / sizeof(Bits);
  using Vector = Piece<Type, kWidth>;
  const auto* input = (const Vector*)(call.residual == nullptr ? call.input : call.sum);
  const auto* kept = (const Vector*)shared.kept + threadIdx.x;
  const unsigned group_channels = call.channels / call.groups;
  for (unsigned turn = 0; turn < call.spread.turns; ++turn) {
    const unsigned channel = tile.channel(turn);
    if (!tile.has(channel)) continue;
    float centers[kWidth], factors[kWidth], shifts[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const unsigned of = channel + (call.is_channels_last ? k : 0);
      const unsigned group = of / group_channels - first_group;
      centers[k] = mean[group];
      factors[k] = rstd[group] * weight_of(call, of);
      shifts[k] = bias_of(call, of);
    }
    Vector pieces[kAhead];
    const auto load = [&](int i, long long at) {
      if constexpr (kKeeps) {
        pieces[i] = *kept;
        kept += blockDim.x;
      } else {
        pieces[i] = input[at];
      }
    };
    const auto use = [&](int i, long long at) {
      float values[kWidth];
      pieces[i].read(values);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        values[k] = fmaf(values[k] - centers[k], factors[k], shifts[k]);
      }
      if (call.has_silu) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) values[k] = Silu::of(values[k]).x;
      }
      ((Vector*)call.out)[at] = Vector::of(values);
    };
    tile.template each<kAhead>(channel, load, use);
  }
}

// Groups of a sample that are a block's, from the first number to the result.
template <int kBytes>
__device__ void whole(const GroupNormCall& call) {
  const Tile<kBytes> tile(call, blockIdx.x);
  const Shared shared(call.spread);
  find_moments<kBytes, true>(call, tile, shared, [&](unsigned channel, const Moments& moments) {
    shared.channels[2 * (channel - tile.first_channel)] = moments.floats[0];
    shared.channels[2 * (channel - tile.first_channel) + 1] = moments.floats[1];
  });
  __syncthreads();
  // A warp joins the channels of a group, which have as many numbers each.
  const unsigned group_channels = call.channels / call.groups;
  const unsigned groups = (tile.end_channel - tile.first_channel) / group_channels;
  const unsigned first_group = tile.first_channel / group_channels;
  float *mean = shared.groups, *rstd = shared.groups + groups;
  for (unsigned group = threadIdx.x / 32; group < groups; group += blockDim.x / 32) {
    const float* moments = shared.channels + 2 * group * group_channels;
    float sum = 0, squares = 0, apart = 0;
    for (unsigned i = threadIdx.x % 32; i < group_channels; i += 32) {
      sum += moments[2 * i] - moments[0];
    }
    const float center = moments[0] + sum_within_warp(sum, 32) / group_channels;
    for (unsigned i = threadIdx.x % 32; i < group_channels; i += 32) {
      const float distance = moments[2 * i] - center;
      apart += distance * distance;
      squares += moments[2 * i + 1];
    }
    squares = sum_within_warp(fmaf(apart, call.positions, squares), 32);
    if (threadIdx.x % 32 != 0) continue;
    mean[group] = center;
    rstd[group] = rsqrtf(squares / ((float)group_channels * call.positions) + call.eps);
    const unsigned at = tile.sample * call.groups + first_group + group;
    if (call.mean != nullptr) {
      call.mean[at] = mean[group];
      call.rstd[at] = rstd[group];
    }
  }
  __syncthreads();
  normalize<kBytes, true>(call, tile, shared, mean, rstd, first_group);
}

template <int kBytes>
__device__ void moments(const GroupNormCall& call) {
  const Tile<kBytes> tile(call, blockIdx.x);
  const long long numbers = (long long)call.samples * call.spread.stretches * call.channels;
  float* partial = call.partial + (long long)tile.row * call.channels;
  find_moments<kBytes, false>(call, tile, Shared(call.spread),
                              [&](unsigned channel, const Moments& moments) {
                                partial[channel] = moments.floats[0];
                                partial[numbers + channel] = moments.floats[1];
                              });
}

// Of a group, from the moments of its channels in all stretches.
template <int kBytes>
__device__ void groups(const GroupNormCall& call) {
  __shared__ float scratch[2][1][32];
  const unsigned group_channels = call.channels / call.groups, stretches = call.spread.stretches;
  const unsigned sample = blockIdx.x / call.groups, group = blockIdx.x - sample * call.groups;
  const unsigned stretch = call.spread.stretch * (call.is_channels_last ? 1 : kBytes / n);
  const long long numbers = (long long)call.samples * stretches * call.channels;
  const float* partial = call.partial + (long long)sample * stretches * call.channels +
                         (long long)group * group_channels;
  const unsigned parts = stretches * group_channels;
  // Where the moments of a part are, a channel's in a stretch, and of how many numbers.
  const auto moments_of = [&](unsigned part) {
    const unsigned row = part / group_channels;
    return partial + (long long)row * call.channels + (part - row * group_channels);
  };
  const auto count_of = [&](unsigned part) -> float {
    return min(stretch, call.positions - part / group_channels * stretch);
  };
  const float base = partial[0], count = (float)group_channels * call.positions;
  float sum[1] = {}, squares[1] = {};
  for (unsigned part = threadIdx.x; part < parts; part += blockDim.x) {
    sum[0] = fmaf(count_of(part), moments_of(part)[0] - base, sum[0]);
  }
  sum_up(sum, blockDim.x, scratch[0]);
  const float mean = base + sum[0] / count;
  for (unsigned part = threadIdx.x; part < parts; part += blockDim.x) {
    const float* moments = moments_of(part);
    const float distance = moments[0] - mean;
    squares[0] += fmaf(count_of(part) * distance, distance, moments[numbers]);
  }
  sum_up(squares, blockDim.x, scratch[1]);
  if (threadIdx.x > 0) return;
  call.mean[blockIdx.x] = mean;
  call.rstd[blockIdx.x] = rsqrtf(squares[0] / count + call.eps);
}

template <int kBytes>
__device__ void apply(const GroupNormCall& call) {
  const Tile<kBytes> tile(call, gridDim.x - 1 - blockIdx.x);
  const unsigned at = tile.sample * call.groups;
  normalize<kBytes, false>(call, tile, Shared(call.spread), call.mean + at, call.rstd + at, 0);
}

}  // namespace

GROUP_NORM(whole, 16, 512, 2)
GROUP_NORM(whole, 8, 512, 2)
GROUP_NORM(whole, n, 512, 2)
GROUP_NORM(moments, 16, 512, 2)
GROUP_NORM(moments, 8, 512, 2)
GROUP_NORM(moments, n, 512, 2)
GROUP_NORM(groups, 16, 256, 1)
GROUP_NORM(groups, 8, 256, 1)
GROUP_NORM(groups, n, 256, 1)
GROUP_NORM(apply, 16, 512, 2)
GROUP_NORM(apply, 8, 512, 2)
GROUP_NORM(apply, n, 512, 2)
