// Layer norm and RMS norm of rows. Compiled when the package is built
// (cmake/compile_kernels.py), once for each type of the rows; norm_rows_cuda.cpp launches it.
//
// A row stays in the registers of the threads that share it, and threads have no second one: of
// blocks that come and go as many are on a multiprocessor as it takes to keep memory busy. Blocks
// that stay, with the next row on its way, were measured slower in every form.

#include "norm_moments.cuh"

namespace {

__device__ float first_of(const NormCall& call, unsigned row) {
  const float input = Type::read(*row_of(call.input, row));
  return call.residual.data == nullptr ? input : input + Type::read(*row_of(call.residual, row));
}

// Of a layer norm's full rows that whole warps share, kVectors a power of two. Each warp has the
// sum of its numbers, and the squares of their distances from its own mean: what these lack are the
// distances of the warps' means from the row's. So threads wait for each other once and not twice.
// (Adaptive norms, whose blocks have more to load, were 1 to 2 % slower by this.)
template <int kVectors, int kWidth, class First>
__device__ Moments moments_of_warps(Piece<Type, kWidth> (&pieces)[kVectors], const NormCall& call,
                                    const First& first, float (*scratch)[32]) {
  constexpr float kOfWarp = 32 * kVectors * kWidth;
  const EachPiece<kVectors, true> places{call.group, 0};
  const float per_column = 1.0f / call.columns;
  float base = 0;
  if constexpr (kVectors * kWidth * kMostThreads > kExactColumns) base = first();
  const Mean mean_of(call.columns, per_column, base);
  float sum = 0, squares = 0;
  places.each([&](int v, unsigned) {
    float values[kWidth];
    pieces[v].read(values);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) mean_of.add(values[k], sum);
  });
  sum = sum_within_warp(sum, 32);
  stay_packed(pieces);
  // Powers of two: equal numbers are at no distance from the mean of theirs.
  const float unscale = 1 / (kOfWarp * mean_of.scale), center = base + sum * unscale;
  places.each([&](int v, unsigned) {
    float values[kWidth];
    pieces[v].read(values);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) squares += (values[k] - center) * (values[k] - center);
  });
  squares = sum_within_warp(squares, 32);
  stay_packed(pieces);
  const unsigned lane = threadIdx.x % 32, warps = call.group / 32;
  if (lane == 0) {
    scratch[0][threadIdx.x / 32] = sum;
    scratch[1][threadIdx.x / 32] = squares;
  }
  __syncthreads();
  sum = lane < warps ? scratch[0][lane] : 0;
  squares = lane < warps ? scratch[1][lane] : 0;
  const float mean = mean_of.of(sum_within_warp(sum, 32));
  const float far = lane < warps ? base + sum * unscale - mean : 0;
  squares = sum_within_warp(squares + kOfWarp * far * far, 32);
  return {mean, rsqrtf(squares * per_column + call.eps)};
}

template <bool kIsLayer, bool kIsFull, int kVectors, int kWidth>
__device__ Moments moments_of_row(Piece<Type, kWidth> (&pieces)[kVectors], unsigned vectors,
                                  const NormCall& call, unsigned row, float (*scratch)[32]) {
  constexpr bool kIsPower = (kVectors & (kVectors - 1)) == 0;
  const auto first = [&] { return first_of(call, row); };
  if constexpr (kIsLayer && kIsFull && kIsPower && Piece<Type, kWidth>::kIsPaired) {
    if (call.group > 32) return moments_of_warps(pieces, call, first, scratch);
  }
  return moments_of<kIsFull>(pieces, vectors, call, kIsLayer, first, scratch);
}

// The norm of a thread's pieces. A weight and bias are of one type, Parameters.
template <class Parameters, bool kIsLayer, bool kIsFull, int kVectors, int kWidth>
__device__ void write(const NormCall& call, const Piece<Type, kWidth> (&pieces)[kVectors],
                      unsigned row, unsigned vectors, float mean, float rstd) {
  constexpr int kPart = sizeof(typename Parameters::Bits) * kWidth <= 16 ? kWidth : kWidth / 2;
  using Part = Piece<Parameters, kPart>;
  const auto *weight = (const Part*)call.weight, *bias = (const Part*)call.bias;
  auto* out = (Piece<Type, kWidth>*)call.out + (long long)row * vectors;
  each<kVectors, kIsFull>(call.group, vectors, [&](int v, unsigned at) {
    float values[kWidth];
    pieces[v].read(values);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] = (values[k] - mean) * rstd;
#pragma unroll
    for (int first = 0; first < kWidth; first += kPart) {
      const unsigned part = at * (kWidth / kPart) + first / kPart;
      if (weight != nullptr) {
        float factors[kPart];
        weight[part].read(factors);
        if (call.zero_centered) {
#pragma unroll
          for (int k = 0; k < kPart; ++k) factors[k] += 1;
        }
#pragma unroll
        for (int k = 0; k < kPart; ++k) values[first + k] *= factors[k];
      }
      if (kIsLayer && bias != nullptr) {
        float shifts[kPart];
        bias[part].read(shifts);
#pragma unroll
        for (int k = 0; k < kPart; ++k) values[first + k] += shifts[k];
      }
    }
    out[at] = Piece<Type, kWidth>::of(values);
  });
}

template <int kBytes, int kVectors, bool kIsLayer, bool kIsFull>
__device__ void forward_rows(const NormCall& call) {
  constexpr int kWidth = kBytes / sizeof(Bits);
  using Vector = Piece<Type, kWidth>;
  __shared__ float scratch[2][32];
  const unsigned group = call.group;
  const unsigned row = blockIdx.x * (blockDim.x / group) + threadIdx.x / group;
  const unsigned vectors = kIsFull || row < call.rows ? call.columns / kWidth : 0;
  Vector pieces[kVectors];
  const auto* input = (const Vector*)row_of(call.input, row);
  each<kVectors, kIsFull>(group, vectors, [&](int v, unsigned at) { pieces[v] = input[at]; });
  if (call.residual.data != nullptr) {
    const auto* residual = (const Vector*)row_of(call.residual, row);
    auto* sum = (Vector*)call.sum + (long long)row * vectors;
    each<kVectors, kIsFull>(group, vectors, [&](int v, unsigned at) {
      float values[kWidth], other[kWidth];
      pieces[v].read(values);
      residual[at].read(other);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) values[k] += other[k];
      sum[at] = pieces[v] = Vector::of(values);  // the norm is of what is written
    });
  }
  const auto [mean, rstd] = moments_of_row<kIsLayer, kIsFull>(pieces, vectors, call, row, scratch);
  if (!kIsFull && row >= call.rows) return;
  if (threadIdx.x % group == 0) {
    if (call.rstd != nullptr) call.rstd[row] = rstd;
    if (kIsLayer && call.mean != nullptr) call.mean[row] = mean;
  }
  if (call.is_weight_float) {
    write<Float, kIsLayer, kIsFull>(call, pieces, row, vectors, mean, rstd);
  } else {
    write<Type, kIsLayer, kIsFull>(call, pieces, row, vectors, mean, rstd);
  }
}

// kVectors pieces of kBytes a thread.
template <int kBytes, int kVectors, bool kIsLayer>
__device__ void forward(const NormCall& call) {
  wait_for_inputs();
  let_next_start();
  // Looking whether a piece is there takes a tenth of the instructions, which are what limits this.
  const bool is_full = call.columns == kVectors * call.group * (kBytes / sizeof(Bits)) &&
                       call.rows == gridDim.x * (blockDim.x / call.group);
  if (is_full) {
    forward_rows<kBytes, kVectors, kIsLayer, true>(call);
  } else {
    forward_rows<kBytes, kVectors, kIsLayer, false>(call);
  }
}

// Rows of any size, a block each, read twice or three times. Each thread reads only pieces that it
// has written or that are the input's.
template <int kBytes>
__device__ void forward_any(const NormCall& call) {
  using Row = AnyRow<kBytes>;
  using Vector = typename Row::Vector;
  constexpr int kWidth = Row::kWidth;
  __shared__ float scratch[2][32];
  const unsigned row = blockIdx.x, vectors = call.columns / kWidth;
  wait_for_inputs();
  const auto* input = (const Vector*)row_of(call.input, row);
  if (call.residual.data != nullptr) {
    const auto* residual = (const Vector*)row_of(call.residual, row);
    auto* sum = (Vector*)call.sum + (long long)row * vectors;
    Row::each(input, vectors, [&](float (&values)[kWidth], unsigned at) {
      float other[kWidth];
      residual[at].read(other);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) values[k] += other[k];
      sum[at] = Vector::of(values);
    });
    input = sum;
  }
  float sums[1] = {0};
  float mean = 0;
  if (call.is_layer) {
    const Mean mean_of(call.columns, 1.0f / call.columns, first_of(call, row));
    Row::each(input, vectors, [&](const float (&values)[kWidth], unsigned) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) mean_of.add(values[k], sums[0]);
    });
    sum_up(sums, blockDim.x, scratch);
    mean = mean_of.of(sums[0]);
    sums[0] = 0;
  }
  Row::each(input, vectors, [&](const float (&values)[kWidth], unsigned) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sums[0] += (values[k] - mean) * (values[k] - mean);
  });
  sum_up(sums, blockDim.x, scratch + 1);
  const float rstd = rsqrtf(sums[0] / call.columns + call.eps);
  if (threadIdx.x == 0 && call.rstd != nullptr) call.rstd[row] = rstd;
  if (threadIdx.x == 0 && call.mean != nullptr) call.mean[row] = mean;
  const Parameter factor = factor_of(call), bias = bias_of(call);
  auto* out = (Vector*)call.out + (long long)row * vectors;
  Row::each(input, vectors, [&](const float (&values)[kWidth], unsigned at) {
    float weights[kWidth], shifts[kWidth], result[kWidth];
    factor.read(at, weights);
    bias.read(at, shifts);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      result[k] = (values[k] - mean) * rstd * weights[k] + shifts[k];
    }
    out[at] = Vector::of(result);
  });
}

}  // namespace

NORM(forward, 16, 2, 1024, 2)
NORM(forward, 16, 4, 512, 3)
NORM(forward, 16, 5, 256, 4)
NORM(forward, 16, 6, 256, 4)
NORM(forward, 16, 8, 512, 2)
NORM(forward, 8, 1, 256, 8)
NORM(forward, 8, 4, 1024, 1)
NORM(forward, n, 2, 256, 8)
NORM(forward, n, 8, 1024, 1)
NORM_ANY(forward_any_16, 1024, forward_any<16>)
NORM_ANY(forward_any_n, 1024, forward_any<n>)
