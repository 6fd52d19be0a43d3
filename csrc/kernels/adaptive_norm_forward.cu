// Adaptive norms of rows: layer norm and RMS norm, multiplied and shifted by numbers of the sample
// that a row belongs to. Compiled when the package is built (cmake/compile_kernels.py), once for
// each type of the rows; adaptive_norm_cuda.cpp launches it.
//
// Rows lie in registers as in norm_forward.cu, and blocks come and go as there. Where samples have
// rows enough, threads that share a row have several of a sample at once: they read its scale and
// shift once for all of them, and wait for each other's sums once.

#include "adaptive_norm.cuh"
#include "norm_moments.cuh"

namespace {

constexpr unsigned kMostTogether = 512;  // threads that share several rows

__device__ float first_of(const AdaptiveNormCall& call, unsigned row, unsigned sample) {
  const float input = Type::read(*row_of(call.input, row));
  if (call.update.data == nullptr) return input;
  float gate[1];
  gate_of(call, sample).read(0, gate);
  return Type::read(Type::write(input + gate[0] * Type::read(*row_of(call.update, row))));
}

// In place of normed numbers, what they become. Scale and shift are of one type, Modulation.
template <class Modulation, bool kHasParameters, int kWidth>
__device__ void modulate(const AdaptiveNormCall& call, const void* scale, const void* shift,
                         unsigned at, float (&values)[kWidth]) {
  if constexpr (kHasParameters) {
    float weights[kWidth], biases[kWidth];
    weight_of(call).read(at, weights);
    bias_of(call).read(at, biases);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] = values[k] * weights[k] + biases[k];
  }
  constexpr int kPart = sizeof(typename Modulation::Bits) * kWidth <= 16 ? kWidth : kWidth / 2;
  using Part = Piece<Modulation, kPart>;
#pragma unroll
  for (int first = 0; first < kWidth; first += kPart) {
    const unsigned part = at * (kWidth / kPart) + first / kPart;
    if (scale != nullptr) {
      float scales[kPart];
      const Part piece = ((const Part*)scale)[part];  // one load, not one for each part of it
      piece.read(scales);
#pragma unroll
      for (int k = 0; k < kPart; ++k) values[first + k] *= 1 + scales[k];
    }
    if (shift != nullptr) {
      float shifts[kPart];
      const Part piece = ((const Part*)shift)[part];
      piece.read(shifts);
#pragma unroll
      for (int k = 0; k < kPart; ++k) values[first + k] += shifts[k];
    }
  }
}

template <class Modulation, bool kHasParameters, bool kIsFull, int kVectors, int kWidth>
__device__ void write(const AdaptiveNormCall& call, const Piece<Type, kWidth> (&pieces)[kVectors],
                      unsigned row, unsigned sample, unsigned vectors, const Moments& moments) {
  const void *scale = factor_of(call, sample).data, *shift = shift_of(call, sample).data;
  auto* out = (Piece<Type, kWidth>*)call.out + (long long)row * vectors;
  each<kVectors, kIsFull>(call.group, vectors, [&](int v, unsigned at) {
    float values[kWidth];
    pieces[v].read(values);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] = (values[k] - moments.mean) * moments.rstd;
    modulate<Modulation, kHasParameters>(call, scale, shift, at, values);
    out[at] = Piece<Type, kWidth>::of(values);
  });
}

// In place of a piece's numbers, their sum with the gated update, as it is written.
template <int kWidth>
__device__ Piece<Type, kWidth> add_update(const Parameter& gate, Piece<Type, kWidth> update,
                                          unsigned at, float (&values)[kWidth]) {
  float other[kWidth], gates[kWidth];
  update.read(other);
  gate.read(at, gates);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) values[k] += gates[k] * other[k];
  return Piece<Type, kWidth>::of(values);
}

__device__ void keep_moments(const AdaptiveNormCall& call, unsigned row, const Moments& moments) {
  if (call.rstd != nullptr) call.rstd[row] = moments.rstd;
  if (call.mean != nullptr) call.mean[row] = moments.mean;
}

template <int kBytes, int kVectors, bool kIsFull>
__device__ void forward_rows(const AdaptiveNormCall& call) {
  constexpr int kWidth = kBytes / sizeof(Bits);
  using Vector = Piece<Type, kWidth>;
  __shared__ float scratch[2][32];
  const unsigned group = call.group;
  const unsigned row = blockIdx.x * (blockDim.x / group) + threadIdx.x / group;
  const bool is_row = kIsFull || row < call.rows;
  const unsigned vectors = is_row ? call.columns / kWidth : 0;
  Vector pieces[kVectors];
  const auto* input = (const Vector*)row_of(call.input, row);
  each<kVectors, kIsFull>(group, vectors, [&](int v, unsigned at) { pieces[v] = input[at]; });
  const unsigned sample = is_row ? row / call.tokens : 0;
  if (call.update.data != nullptr) {
    const Parameter gate = gate_of(call, sample);
    const auto* update = (const Vector*)row_of(call.update, row);
    auto* sum = (Vector*)call.sum + (long long)row * vectors;
    each<kVectors, kIsFull>(group, vectors, [&](int v, unsigned at) {
      float values[kWidth];
      pieces[v].read(values);
      sum[at] = pieces[v] = add_update(gate, update[at], at, values);
    });
  }
  const auto first = [&] { return first_of(call, row, sample); };
  const Moments moments = moments_of<kIsFull>(pieces, vectors, call, call.is_layer, first, scratch);
  if (!is_row) return;
  if (threadIdx.x % group == 0) keep_moments(call, row, moments);
  // Parameters that are not there take no registers, which say how many rows are under way.
  if (call.weight != nullptr || call.bias != nullptr) {
    if (call.is_scale_float) {
      write<Float, true, kIsFull>(call, pieces, row, sample, vectors, moments);
    } else {
      write<Type, true, kIsFull>(call, pieces, row, sample, vectors, moments);
    }
  } else if (call.is_scale_float) {
    write<Float, false, kIsFull>(call, pieces, row, sample, vectors, moments);
  } else {
    write<Type, false, kIsFull>(call, pieces, row, sample, vectors, moments);
  }
}

// kVectors pieces of kBytes a thread.
template <int kBytes, int kVectors>
__device__ void forward(const AdaptiveNormCall& call) {
  wait_for_inputs();
  let_next_start();
  const bool is_full = call.columns == kVectors * call.group * (kBytes / sizeof(Bits)) &&
                       call.rows == gridDim.x * (blockDim.x / call.group);
  if (is_full) {
    forward_rows<kBytes, kVectors, true>(call);
  } else {
    forward_rows<kBytes, kVectors, false>(call);
  }
}

// The moments of kRows rows that a thread has pieces of; `has(v)`: whether it has a piece v of
// each.
template <int kRows, int kVectors, int kWidth, class Has, class First>
__device__ void moments_of_rows(Piece<Type, kWidth> (&pieces)[kRows][kVectors],
                                const AdaptiveNormCall& call, const Has& has, const First& first,
                                Moments (&moments)[kRows], float (*scratch)[kRows][32]) {
  const float per_column = 1.0f / call.columns;
  float sums[kRows] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) moments[r].mean = 0;
  if (call.is_layer) {
    float bases[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if constexpr (kVectors * kWidth * kMostTogether > kExactColumns) bases[r] = first(r);
      const Mean mean_of(call.columns, per_column, bases[r]);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (!has(v)) continue;
        float values[kWidth];
        pieces[r][v].read(values);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) mean_of.add(values[k], sums[r]);
      }
    }
    sum_up(sums, call.group, scratch[0]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      stay_packed(pieces[r]);
      moments[r].mean = Mean(call.columns, per_column, bases[r]).of(sums[r]);
      sums[r] = 0;
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!has(v)) continue;
      float values[kWidth];
      pieces[r][v].read(values);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        sums[r] += (values[k] - moments[r].mean) * (values[k] - moments[r].mean);
      }
    }
  }
  sum_up(sums, call.group, scratch[1]);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    stay_packed(pieces[r]);
    moments[r].rstd = rsqrtf(sums[r] * per_column + call.eps);
  }
}

// kRows rows of a sample, kVectors pieces of each a thread. Of pieces of 16 bytes every thread has
// all but the last one (adaptive_norm_launch.cpp). A sample's last rows may be fewer: what is
// computed in their place is that of its last row, and not written.
template <int kBytes, int kVectors, int kRows>
__device__ void forward_together(const AdaptiveNormCall& call) {
  constexpr int kWidth = kBytes / sizeof(Bits);
  using Vector = Piece<Type, kWidth>;
  __shared__ float scratch[2][kRows][32];
  const unsigned group = call.group, vectors = call.columns / kWidth;
  const unsigned samples = call.rows / call.tokens, turns = (call.tokens + kRows - 1) / kRows;
  const unsigned turn = blockIdx.x * (blockDim.x / group) + threadIdx.x / group;
  const unsigned sample = min(turn / turns, samples - 1), last = (sample + 1) * call.tokens - 1;
  const unsigned start = sample * call.tokens + (turn - sample * turns) * kRows;
  const auto row = [&](int r) { return min(start + r, last); };
  const auto at = [&](int v) { return threadIdx.x % group + v * group; };
  const auto has = [&](int v) { return (kBytes == 16 && v + 1 < kVectors) || at(v) < vectors; };
  wait_for_inputs();
  let_next_start();
  Vector pieces[kRows][kVectors];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const auto* input = (const Vector*)row_of(call.input, row(r));
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (has(v)) pieces[r][v] = load_whole(input + at(v));
    }
  }
  if (call.update.data != nullptr) {
    const Parameter gate = gate_of(call, sample);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!has(v)) continue;
      float gates[kWidth];
      gate.read(at(v), gates);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float values[kWidth], other[kWidth];
        pieces[r][v].read(values);
        ((const Vector*)row_of(call.update, row(r)))[at(v)].read(other);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) values[k] += gates[k] * other[k];
        pieces[r][v] = Vector::of(values);  // the norm is of what is written
        if (start + r <= last) {
          ((Vector*)call.sum)[(long long)row(r) * vectors + at(v)] = pieces[r][v];
        }
      }
    }
  }
  const auto first = [&](int r) { return first_of(call, row(r), sample); };
  Moments moments[kRows];
  moments_of_rows(pieces, call, has, first, moments, scratch);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (threadIdx.x % group == 0 && start + r <= last) keep_moments(call, row(r), moments[r]);
  }
  const Parameter scale = factor_of(call, sample), shift = shift_of(call, sample);
  const Parameter weight = weight_of(call), bias = bias_of(call);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!has(v)) continue;
    float scales[kWidth], shifts[kWidth];
    scale.read(at(v), scales);
    shift.read(at(v), shifts);
    if (call.weight != nullptr || call.bias != nullptr) {
      float weights[kWidth], biases[kWidth];
      weight.read(at(v), weights);
      bias.read(at(v), biases);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        shifts[k] += biases[k] * scales[k];
        scales[k] *= weights[k];
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float values[kWidth];
      pieces[r][v].read(values);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        values[k] = (values[k] - moments[r].mean) * moments[r].rstd * scales[k] + shifts[k];
      }
      if (start + r <= last) {
        ((Vector*)call.out)[(long long)row(r) * vectors + at(v)] = Vector::of(values);
      }
    }
  }
}

// Rows of any size, a block each, read twice or three times. Each thread reads only pieces that it
// has written or that are the input's.
template <int kBytes>
__device__ void forward_any(const AdaptiveNormCall& call) {
  using Row = AnyRow<kBytes>;
  using Vector = typename Row::Vector;
  constexpr int kWidth = Row::kWidth;
  __shared__ float scratch[2][32];
  const unsigned row = blockIdx.x, sample = row / call.tokens, vectors = call.columns / kWidth;
  wait_for_inputs();
  const auto* input = (const Vector*)row_of(call.input, row);
  if (call.update.data != nullptr) {
    const Parameter gate = gate_of(call, sample);
    const auto* update = (const Vector*)row_of(call.update, row);
    auto* sum = (Vector*)call.sum + (long long)row * vectors;
    Row::each(input, vectors, [&](float (&values)[kWidth], unsigned at) {
      sum[at] = add_update(gate, update[at], at, values);
    });
    input = sum;
  }
  float sums[1] = {0};
  Moments moments{};
  if (call.is_layer) {
    const Mean mean_of(call.columns, 1.0f / call.columns, first_of(call, row, sample));
    Row::each(input, vectors, [&](const float (&values)[kWidth], unsigned) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) mean_of.add(values[k], sums[0]);
    });
    sum_up(sums, blockDim.x, scratch);
    moments.mean = mean_of.of(sums[0]);
    sums[0] = 0;
  }
  Row::each(input, vectors, [&](const float (&values)[kWidth], unsigned) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      sums[0] += (values[k] - moments.mean) * (values[k] - moments.mean);
    }
  });
  sum_up(sums, blockDim.x, scratch + 1);
  moments.rstd = rsqrtf(sums[0] / call.columns + call.eps);
  if (threadIdx.x == 0) keep_moments(call, row, moments);
  const Parameter factor = factor_of(call, sample), shift = shift_of(call, sample);
  auto* out = (Vector*)call.out + (long long)row * vectors;
  Row::each(input, vectors, [&](float (&values)[kWidth], unsigned at) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] = (values[k] - moments.mean) * moments.rstd;
    if (call.is_scale_float) {
      modulate<Float, true>(call, factor.data, shift.data, at, values);
    } else {
      modulate<Type, true>(call, factor.data, shift.data, at, values);
    }
    out[at] = Vector::of(values);
  });
}

}  // namespace

#define ADAPTIVE_NORM(name, threads, blocks, ...)                           \
  extern "C" __global__ void __launch_bounds__(threads, blocks)             \
      adaptive_norm_##name(const __grid_constant__ AdaptiveNormCall call) { \
    __VA_ARGS__(call);                                                      \
  }

ADAPTIVE_NORM(forward_3_together, 512, 1, forward_together<16, 3, 2>)
ADAPTIVE_NORM(forward_4_together, 512, 1, forward_together<16, 4, 2>)
ADAPTIVE_NORM(forward_5_together, 512, 1, forward_together<16, 5, 2>)
ADAPTIVE_NORM(forward_n_together, 512, 1, forward_together<n, 8, 4>)
ADAPTIVE_NORM(forward_16_2, 1024, 1, forward<16, 2>)
ADAPTIVE_NORM(forward_16_4, 512, 2, forward<16, 4>)
ADAPTIVE_NORM(forward_16_8, 512, 1, forward<16, 8>)
ADAPTIVE_NORM(forward_n_2, 256, 8, forward<n, 2>)
ADAPTIVE_NORM(forward_n_8, 1024, 1, forward<n, 8>)
ADAPTIVE_NORM(forward_any_16, 1024, 1, forward_any<16>)
ADAPTIVE_NORM(forward_any_n, 1024, 1, forward_any<n>)
