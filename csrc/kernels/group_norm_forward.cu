// Group norm, and the sum and activation that it comes with. Compiled when the package is built
// (cmake/compile_kernels.py), once for each type of the numbers; group_norm_cuda.cpp launches it.
//
// Groups come here that neither stay in registers (group_norm_held.cu) nor are shared by blocks
// that all run at once (group_norm_resident.cu). Where some groups of a sample fit into a block's
// shared memory, one kernel reads them once. Else one finds mean and deviation of each group, or
// channel, in each stretch of positions, a small one those of the groups as a whole, and a third
// reads everything again, the last stretches first: these may still be in the L2 cache.

#include "group_norm_moments.cuh"

namespace {

constexpr int kAhead = 4;

// Takes in the numbers of the thread's channels in a turn. Pieces are of the sum where there is a
// residual: the norm is of what is written. Else those that are to be kept, are.
template <bool kKeeps, int kBytes, bool kIsLast, class Found>
__device__ void take_turn(const GroupNormCall& call, const Tile<kBytes, kIsLast>& tile,
                          unsigned channel, typename Tile<kBytes, kIsLast>::Vector*& kept,
                          Found& found) {
  using Vector = typename Tile<kBytes, kIsLast>::Vector;
  constexpr int kWidth = Tile<kBytes, kIsLast>::kWidth;
  const auto *input = (const Vector*)call.input, *residual = (const Vector*)call.residual;
  auto* sum = (Vector*)call.sum;
  if (!tile.has(channel)) return;
  Vector pieces[kAhead];
  const auto load = [&](int i, long long at) {
    if (residual == nullptr) {
      pieces[i] = kKeeps ? *kept : input[at];
      if constexpr (kKeeps) kept += blockDim.x;
      return;
    }
    pieces[i] = input[at];
    float values[kWidth];
    pieces[i].read(values);
    residual[at].add_to(values);
    pieces[i] = Vector::of(values);
  };
  // Nothing is stored before all is loaded: no load would be moved over that.
  const auto use = [&](int i, long long at) {
    float values[kWidth];
    if (residual != nullptr) {
      sum[at] = pieces[i];
      if constexpr (kKeeps) {
        *kept = pieces[i];
        kept += blockDim.x;
      }
    }
    pieces[i].read(values);
    found.take(values);
  };
  tile.template each<kAhead>(channel, load, use);
}

// The moments of each of the block's channels; `write` gets them.
template <bool kKeeps, int kBytes, bool kIsLast, class Write>
__device__ void find_moments(const GroupNormCall& call, const Tile<kBytes, kIsLast>& tile,
                             const Shared& shared, const Write& write) {
  using Vector = typename Tile<kBytes, kIsLast>::Vector;
  constexpr int kWidth = Tile<kBytes, kIsLast>::kWidth;
  constexpr int kChannels = Tile<kBytes, kIsLast>::kChannels;
  auto* kept = (Vector*)shared.kept + threadIdx.x;
  for (unsigned turn = 0; turn < call.spread.turns; ++turn) {
    const unsigned channel = tile.channel(turn);
    PieceMoments<kWidth, kIsLast> found;
    take_turn<kKeeps>(call, tile, channel, kept, found);
    Moments moments[kChannels];
#pragma unroll
    for (int k = 0; k < kChannels; ++k) moments[k] = found.moments(k);
    join<kIsLast>(call, tile.lane, moments, shared.scratch);
    if (tile.lane != 0 || !tile.has(channel)) continue;
#pragma unroll
    for (int k = 0; k < kChannels; ++k) write(channel + k, moments[k]);
  }
}

// The moments of all of the block's numbers, which are one group's; every thread has the result.
// Threads wait for each other once, not once a turn.
template <bool kKeeps, int kBytes, bool kIsLast>
__device__ Moments find_all_moments(const GroupNormCall& call, const Tile<kBytes, kIsLast>& tile,
                                    const Shared& shared) {
  using Vector = typename Tile<kBytes, kIsLast>::Vector;
  auto* kept = (Vector*)shared.kept + threadIdx.x;
  PieceMoments<Tile<kBytes, kIsLast>::kWidth, false> found;
  for (unsigned turn = 0; turn < call.spread.turns; ++turn) {
    take_turn<kKeeps>(call, tile, tile.channel(turn), kept, found);
  }
  Moments all = found.moments(0);
  join_lanes(all, 32);
  auto* of_warps = (Moments*)shared.scratch;
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = all;
  __syncthreads();
  all = of_warps[0];
  for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) all.take(of_warps[warp]);
  return all;
}

// The norm of the block's numbers; `mean` and `rstd` are those of groups from `first_group` on.
template <bool kKeeps, int kBytes, bool kIsLast>
__device__ void normalize(const GroupNormCall& call, const Tile<kBytes, kIsLast>& tile,
                          const Shared& shared, const float* mean, const float* rstd,
                          unsigned first_group) {
  using Vector = typename Tile<kBytes, kIsLast>::Vector;
  constexpr int kWidth = Tile<kBytes, kIsLast>::kWidth;
  constexpr int kChannels = Tile<kBytes, kIsLast>::kChannels;
  const auto* input = (const Vector*)(call.residual == nullptr ? call.input : call.sum);
  const auto* kept = (const Vector*)shared.kept + threadIdx.x;
  for (unsigned turn = 0; turn < call.spread.turns; ++turn) {
    const unsigned channel = tile.channel(turn);
    if (!tile.has(channel)) continue;
    float centers[kChannels], factors[kChannels], shifts[kChannels];
    tile.each_channel(channel, [&](int k, unsigned of, unsigned group) {
      centers[k] = mean[group - first_group];
      factors[k] = rstd[group - first_group] * weight_of(call, of);
      shifts[k] = bias_of(call, of);
    });
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
        const int c = kIsLast ? k : 0;
        values[k] = fmaf(values[k] - centers[c], factors[c], shifts[c]);
      }
      if (call.has_silu) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) values[k] = SiluOf<Type::kDigits>::of(values[k]).x;
      }
      ((Vector*)call.out)[at] = Vector::of(values);
    };
    tile.template each<kAhead>(channel, load, use);
  }
}

// The moments of each of the block's groups, which has whole ones: if several, by a warp each
// or a part of one that joins the channels of it, which have as many numbers each; `write` gets the
// group's number in the block, its mean and the squares. Every thread of the block must come here.
template <bool kKeeps, int kBytes, bool kIsLast, class Write>
__device__ void find_group_moments(const GroupNormCall& call, const Tile<kBytes, kIsLast>& tile,
                                   const Shared& shared, const Write& write) {
  const unsigned group_channels = call.channels / call.groups;
  const unsigned groups = (tile.end_channel - tile.first_channel) / group_channels;
  if (groups == 1) {
    const Moments all = find_all_moments<kKeeps>(call, tile, shared);
    if (threadIdx.x == 0) write(0, all.floats[0], all.floats[1]);
    return;
  }
  auto* found = (float2*)shared.channels;
  find_moments<kKeeps>(call, tile, shared, [&](unsigned channel, const Moments& moments) {
    found[channel - tile.first_channel] = {moments.floats[0], moments.floats[1]};
  });
  __syncthreads();
  const unsigned threads = group_threads(groups), lane = threadIdx.x % threads;
  const unsigned together = blockDim.x / threads;
  for (unsigned first = 0; first < groups; first += together) {
    const unsigned group = first + threadIdx.x / threads;
    const float2* moments = found + (group < groups ? group : 0) * group_channels;
    float sum = 0, squares = 0, apart = 0;
    for (unsigned i = lane; i < group_channels; i += threads) {
      sum += moments[i].x - moments[0].x;
    }
    const float mean = moments[0].x + sum_within_warp(sum, threads) / group_channels;
    for (unsigned i = lane; i < group_channels; i += threads) {
      const float distance = moments[i].x - mean;
      apart += distance * distance;
      squares += moments[i].y;
    }
    squares = sum_within_warp(fmaf(apart, tile.numbers, squares), threads);
    if (lane == 0 && group < groups) write(group, mean, squares);
  }
}

// Groups of a sample that are a block's, from the first number to the result.
template <int kBytes, bool kIsLast>
__device__ void whole(const GroupNormCall& call) {
  const Tile<kBytes, kIsLast> tile(call, blockIdx.x);
  const Shared shared(call.spread);
  const unsigned group_channels = call.channels / call.groups;
  const unsigned groups = (tile.end_channel - tile.first_channel) / group_channels;
  const unsigned first_group = tile.first_channel / group_channels;
  float *means = shared.groups, *rstds = shared.groups + groups;
  const auto write = [&](unsigned group, float mean, float squares) {
    const float rstd = rsqrtf(squares / ((float)group_channels * call.positions) + call.eps);
    means[group] = mean;
    rstds[group] = rstd;
    if (call.mean == nullptr) return;
    const unsigned at = tile.sample * call.groups + first_group + group;
    call.mean[at] = mean;
    call.rstd[at] = rstd;
  };
  if (call.residual == nullptr) keep(call, tile, shared, call.input);
  find_group_moments<true>(call, tile, shared, write);
  __syncthreads();
  normalize<true>(call, tile, shared, means, rstds, first_group);
}

// Of the block's groups where it has whole ones, else of its channels.
template <int kBytes, bool kIsLast>
__device__ void moments(const GroupNormCall& call) {
  const Tile<kBytes, kIsLast> tile(call, blockIdx.x);
  const Shared shared(call.spread);
  const unsigned parts = call.spread.has_groups ? call.groups : call.channels;
  const long long numbers = (long long)call.samples * call.spread.stretches * parts;
  float* partial = call.partial + (long long)tile.row * parts;
  if (call.spread.has_groups) {
    partial += tile.first_channel / (call.channels / call.groups);
    find_group_moments<false>(call, tile, shared, [&](unsigned group, float mean, float squares) {
      partial[group] = mean;
      partial[numbers + group] = squares;
    });
    return;
  }
  find_moments<false>(call, tile, shared, [&](unsigned channel, const Moments& moments) {
    partial[channel] = moments.floats[0];
    partial[numbers + channel] = moments.floats[1];
  });
}

// Of a group, from its moments in all stretches, or those of its channels.
template <int kBytes, bool kIsLast>
__device__ void groups(const GroupNormCall& call) {
  __shared__ float scratch[2][1][32];
  const unsigned group_channels = call.channels / call.groups, stretches = call.spread.stretches;
  const unsigned sample = blockIdx.x / call.groups, group = blockIdx.x - sample * call.groups;
  const unsigned stretch = call.spread.stretch * (kIsLast ? 1 : kBytes / n);
  // Of a stretch: all parts, and those of the group, each of so many channels.
  const bool has_groups = call.spread.has_groups;
  const unsigned row_parts = has_groups ? call.groups : call.channels;
  const unsigned group_parts = has_groups ? 1 : group_channels;
  const unsigned part_channels = has_groups ? group_channels : 1;
  const long long numbers = (long long)call.samples * stretches * row_parts;
  const float* partial =
      call.partial + (long long)sample * stretches * row_parts + (long long)group * group_parts;
  const unsigned parts = stretches * group_parts;
  // Where the moments of a part are, and of how many numbers.
  const auto moments_of = [&](unsigned part) {
    const unsigned row = part / group_parts;
    return partial + (long long)row * row_parts + (part - row * group_parts);
  };
  const auto count_of = [&](unsigned part) {
    return (float)part_channels * min(stretch, call.positions - part / group_parts * stretch);
  };
  const float base = partial[0], count = (float)group_channels * call.positions;
  float sum[1] = {}, squares[1] = {};
#pragma unroll 4
  for (unsigned part = threadIdx.x; part < parts; part += blockDim.x) {
    sum[0] = fmaf(count_of(part), moments_of(part)[0] - base, sum[0]);
  }
  sum_up(sum, blockDim.x, scratch[0]);
  const float mean = base + sum[0] / count;
#pragma unroll 4
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

template <int kBytes, bool kIsLast>
__device__ void apply(const GroupNormCall& call) {
  const Tile<kBytes, kIsLast> tile(call, gridDim.x - 1 - blockIdx.x);
  const unsigned at = tile.sample * call.groups;
  normalize<false>(call, tile, Shared(call.spread), call.mean + at, call.rstd + at, 0);
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
