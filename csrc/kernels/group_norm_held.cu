// Group norm of groups that stay in registers, and the sum and activation that it comes with: one
// kernel, which reads each number once. A group has a part of a warp, or several warps; a block has
// several groups as long as they are small. Compiled as group_norm_forward.cu is, which has the
// kernels of larger groups.

#include "group_norm_held.cuh"
#include "mean.cuh"

namespace {

// The group's pieces, or those of its sum with the residual, which is written.
template <int kVectors, int kBytes, bool kIsLast, class Vector>
__device__ void load(const GroupNormCall& call, const HeldGroup<kBytes, kIsLast>& group,
                     Vector (&pieces)[kVectors]) {
  const auto *input = (const Vector*)call.input, *residual = (const Vector*)call.residual;
  group.template each<kVectors>(
      [&](int v, unsigned piece) { pieces[v] = input[group.offset(piece)]; });
  if (residual == nullptr) return;
  group.template each<kVectors>([&](int v, unsigned piece) {
    float values[HeldGroup<kBytes, kIsLast>::kWidth];
    pieces[v].read(values);
    residual[group.offset(piece)].add_to(values);
    pieces[v] = Vector::of(values);
  });
  // Nothing is stored before all is loaded: no load would be moved over that.
  group.template each<kVectors>(
      [&](int v, unsigned piece) { ((Vector*)call.sum)[group.offset(piece)] = pieces[v]; });
}

constexpr unsigned kMostThreads = 1024, kExactNumbers = 1u << (24 - Type::kDigits);

// The first of a group's numbers, where the sum of so many would not be exact.
template <int kVectors, int kBytes, bool kIsLast>
__device__ float base_of(const GroupNormCall& call, const HeldGroup<kBytes, kIsLast>& group) {
  constexpr int kWidth = HeldGroup<kBytes, kIsLast>::kWidth;
  if constexpr (kVectors * kWidth * kMostThreads <= kExactNumbers) return 0;
  if (group.vectors == 0) return 0;
  const float first = Type::read(((const Bits*)call.input)[group.start * kWidth]);
  if (call.residual == nullptr) return first;
  return Type::read(
      Type::write(first + Type::read(((const Bits*)call.residual)[group.start * kWidth])));
}

// The norm of a piece's numbers, of which those of the group have such a mean and 1 / deviation;
// `parameters` are those of the group's channels.
template <bool kIsSplit, int kBytes, bool kIsLast, int kWidth>
__device__ void normalize(const GroupNormCall& call, const HeldGroup<kBytes, kIsLast>& group,
                          unsigned piece, const float2* parameters, float mean, float rstd,
                          float (&values)[kWidth]) {
  if constexpr (kIsLast) {
    const unsigned row = group.divide(piece);
    parameters += (piece - row * group.hold.row_vectors) * kWidth;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      values[k] = fmaf(values[k] - mean, rstd * parameters[k].x, parameters[k].y);
    }
  } else {
    const HeldPiece<kIsSplit> of(call, group, piece, parameters, rstd);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      values[k] = fmaf(values[k] - mean, of.factor(k), of.shift(k));
    }
  }
}

template <bool kIsSplit, int kVectors, int kBytes, bool kIsLast, class Vector>
__device__ void store(const GroupNormCall& call, const HeldGroup<kBytes, kIsLast>& group,
                      const float2* parameters, float mean, float rstd,
                      Vector (&pieces)[kVectors]) {
  constexpr int kWidth = HeldGroup<kBytes, kIsLast>::kWidth;
  group.template each<kVectors>([&](int v, unsigned piece) {
    float values[kWidth];
    pieces[v].read(values);
    normalize<kIsSplit>(call, group, piece, parameters, mean, rstd, values);
    if (call.has_silu) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) values[k] = SiluOf<Type::kDigits>::of(values[k]).x;
    }
    ((Vector*)call.out)[group.offset(piece)] = Vector::of(values);
  });
}

template <int kBytes, bool kIsLast, int kVectors>
__device__ void held(const GroupNormCall& call) {
  using Group = HeldGroup<kBytes, kIsLast>;
  constexpr int kWidth = Group::kWidth;
  extern __shared__ uint4 memory[];
  __shared__ float scratch[2][1][32];
  auto* parameters = (float2*)memory;
  const Group group(call);
  typename Group::Vector pieces[kVectors];
  load(call, group, pieces);
  const unsigned group_channels = call.channels / call.groups;
  read_parameters(call, parameters);
  const unsigned numbers = group_channels * call.positions;
  const float share = 1.0f / numbers;
  const Mean mean_of(numbers, share, base_of<kVectors>(call, group));
  float sum = 0;
  group.template each<kVectors>([&](int v, unsigned) {
    float values[kWidth];
    pieces[v].read(values);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) mean_of.add(values[k], sum);
  });
  stay_packed(pieces);
  const float mean = mean_of.of(group.sum(sum, scratch[0]));
  float squares = 0;
  group.template each<kVectors>([&](int v, unsigned) {
    float values[kWidth];
    pieces[v].read(values);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      squares = fmaf(values[k] - mean, values[k] - mean, squares);
    }
  });
  stay_packed(pieces);
  const float rstd = rsqrtf(fmaf(group.sum(squares, scratch[1]), share, call.eps));
  if (call.mean != nullptr && group.lane == 0 && group.vectors > 0) {
    call.mean[group.group] = mean;
    call.rstd[group.group] = rstd;
  }
  __syncthreads();
  parameters += group.member * group_channels;
  if (kIsLast || !call.hold.is_split) {
    store<false>(call, group, parameters, mean, rstd, pieces);
  } else {
    store<true>(call, group, parameters, mean, rstd, pieces);
  }
}

}  // namespace

#define GROUP_NORM_HELD(bytes, order, is_last, threads, blocks)                      \
  GROUP_NORM_KERNEL(few_##bytes##_##order, threads, blocks, held<bytes, is_last, 2>) \
  GROUP_NORM_KERNEL(many_##bytes##_##order, threads, blocks, held<bytes, is_last, 8>)

// Narrow pieces leave registers for a second block: see held_launch().
GROUP_NORM_HELD(16, first, false, 1024, 1)
GROUP_NORM_HELD(16, last, true, 1024, 1)
GROUP_NORM_HELD(8, first, false, 640, 2)
GROUP_NORM_HELD(8, last, true, 640, 2)
GROUP_NORM_HELD(4, first, false, 640, 2)
GROUP_NORM_HELD(4, last, true, 640, 2)
GROUP_NORM_HELD(n, first, false, 640, 2)
GROUP_NORM_HELD(n, last, true, 640, 2)
