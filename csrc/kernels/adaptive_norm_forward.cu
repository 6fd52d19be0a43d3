// Adaptive norms of rows: layer norm and RMS norm, multiplied and shifted by numbers of the sample
// that a row belongs to. Compiled when the package is built (cmake/compile_kernels.py), once for
// each type of the rows; adaptive_norm_cuda.cpp launches it.
//
// Rows lie in registers as in norm_forward.cu, and blocks come and go as there: those of one sample
// follow one another. Of usual operands, rows that a warp has read its scale and shift from shared
// memory (adaptive_norm_ahead.cuh), others from the first cache.

#include "adaptive_norm.cuh"
#include "adaptive_norm_ahead.cuh"
#include "adaptive_norm_numbers.cuh"
#include "norm_moments.cuh"

namespace {

// Operands of the rows' own type, scale and shift among them and neither weight nor bias, are what
// models have. Looking for others takes registers, which say how many rows are under way.
template <bool kGated>
struct Usual {
  static constexpr bool kIsUsual = true, kIsGated = kGated;
};
struct Any {
  static constexpr bool kIsUsual = false, kIsGated = false;
};

__device__ float first_of(const AdaptiveNormCall& call, unsigned row, unsigned sample) {
  const float input = Type::read(*row_of(call.input, row));
  if (call.update.data == nullptr) return input;
  float gate[1];
  gate_of(call, sample).read(0, gate);
  return Type::read(Type::write(input + gate[0] * Type::read(*row_of(call.update, row))));
}

// In place of normed numbers, what they become. Scale and shift are of one type, Modulation.
// kIsUsual: both are there, and no weight and bias.
template <class Modulation, bool kIsUsual, int kWidth>
__device__ void modulate(const AdaptiveNormCall& call, const void* scale, const void* shift,
                         unsigned at, float (&values)[kWidth]) {
  if constexpr (!kIsUsual) {
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
    if (kIsUsual || scale != nullptr) {
      float scales[kPart];
      const Part piece = ((const Part*)scale)[part];  // one load, not one for each part of it
      piece.read(scales);
#pragma unroll
      for (int k = 0; k < kPart; ++k) values[first + k] += values[first + k] * scales[k];
    }
    if (kIsUsual || shift != nullptr) {
      float shifts[kPart];
      const Part piece = ((const Part*)shift)[part];
      piece.read(shifts);
#pragma unroll
      for (int k = 0; k < kPart; ++k) values[first + k] += shifts[k];
    }
  }
}

template <class Modulation, bool kIsUsual, bool kIsFull, int kVectors, int kWidth>
__device__ void write(const AdaptiveNormCall& call, const Piece<Type, kWidth> (&pieces)[kVectors],
                      unsigned row, const void* scale, const void* shift, unsigned vectors,
                      const Moments& moments) {
  auto* out = (Piece<Type, kWidth>*)call.out + (long long)row * vectors;
  each<kVectors, kIsFull>(call.group, vectors, [&](int v, unsigned at) {
    float values[kWidth];
    pieces[v].read(values);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] = (values[k] - moments.mean) * moments.rstd;
    modulate<Modulation, kIsUsual>(call, scale, shift, at, values);
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

template <class Way, int kBytes, int kVectors, bool kIsFull>
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
  if (Way::kIsUsual ? Way::kIsGated : call.update.data != nullptr) {
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
  const void *scale = factor_of(call, sample).data, *shift = shift_of(call, sample).data;
  if (!Way::kIsUsual && call.is_scale_float) {
    write<Float, Way::kIsUsual, kIsFull>(call, pieces, row, scale, shift, vectors, moments);
  } else {
    write<Type, Way::kIsUsual, kIsFull>(call, pieces, row, scale, shift, vectors, moments);
  }
}

// Of usual operands, several rows a block.
template <bool kIsGated, int kVectors, bool kIsFull>
__device__ void forward_rows_ahead(const AdaptiveNormCall& call) {
  constexpr int kWidth = 16 / sizeof(Bits);
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
  const Ahead ahead(call);
  if constexpr (kIsGated) {
    const auto* update = (const Vector*)row_of(call.update, row);
    each<kVectors, kIsFull>(group, vectors,
                            [&](int v, unsigned at) { ahead.copy_update(v, update + at); });
    ahead.wait();
    const Parameter gate = ahead.gate(sample);
    auto* sum = (Vector*)call.sum + (long long)row * vectors;
    each<kVectors, kIsFull>(group, vectors, [&](int v, unsigned at) {
      float values[kWidth];
      pieces[v].read(values);
      sum[at] = pieces[v] = add_update(gate, *(const Vector*)ahead.update(v), at, values);
    });
  }
  const auto first = [&] { return first_of(call, row, sample); };
  const Moments moments = moments_of<kIsFull>(pieces, vectors, call, call.is_layer, first, scratch);
  if constexpr (!kIsGated) ahead.wait();
  if (!is_row) return;
  if (threadIdx.x % group == 0) keep_moments(call, row, moments);
  const void *scale = ahead.scale(sample), *shift = ahead.shift(sample);
  write<Type, true, kIsFull>(call, pieces, row, scale, shift, vectors, moments);
}

// Rows that no pieces of 16 bytes fit. All that one needs is on its way before any of it is waited
// for: what is read behind something written would come after it, for the compiler cannot know that
// it is not the same memory.
template <class Way, int kNumbers, unsigned kStep>
__device__ void forward_numbers(const AdaptiveNormCall& call) {
  __shared__ float scratch[2][32];
  const unsigned group = call.group;
  const unsigned row = blockIdx.x * (blockDim.x / group) + threadIdx.x / group;
  const bool is_row = row < call.rows;
  const bool is_gated = Way::kIsUsual ? Way::kIsGated : call.update.data != nullptr;
  const unsigned sample = is_row ? row / call.tokens : 0;
  const Numbers<kNumbers, kStep> own(group, is_row ? call.columns : 0);
  const long long dense = (long long)row * call.columns + own.start;
  const Parameter gate = gate_of(call, sample), factor = factor_of(call, sample),
                  shift = shift_of(call, sample);
  unsigned inputs[kNumbers], updates[kNumbers], gate_bits[kNumbers], factor_bits[kNumbers],
      shift_bits[kNumbers];
  own.load(row_of(call.input, row), inputs);
  if (is_gated) {
    own.load(row_of(call.update, row), updates);
    own.template load<false>(gate, gate_bits);
  }
  own.template load<Way::kIsUsual>(factor, factor_bits);
  own.template load<Way::kIsUsual>(shift, shift_bits);
  all_are_asked_for(inputs);
  all_are_asked_for(factor_bits);
  all_are_asked_for(shift_bits);
  float factors[kNumbers], shifts[kNumbers];
  own.template read<Way::kIsUsual>(factor, factor_bits, factors);
  own.template read<Way::kIsUsual>(shift, shift_bits, shifts);
  Piece<Type, 1> numbers[kNumbers];
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) numbers[i].bits[0] = bits_of(inputs[i]);
  if (!Way::kIsUsual && (call.weight != nullptr || call.bias != nullptr)) {
    own.each([&](int i, unsigned further) {
      float weight[1], bias[1];
      weight_of(call).read(own.start + further, weight);
      bias_of(call).read(own.start + further, bias);
      shifts[i] += bias[0] * factors[i];
      factors[i] *= weight[0];
    });
  }
  if (is_gated) {
    float gates[kNumbers];
    all_are_asked_for(updates);
    all_are_asked_for(gate_bits);
    own.template read<false>(gate, gate_bits, gates);
    Bits* sum = (Bits*)call.sum + dense;
    own.each([&](int i, unsigned further) {
      const float total = number_of(inputs[i]) + gates[i] * number_of(updates[i]);
      sum[further] = numbers[i].bits[0] = Type::write(total);
    });
  }
  const auto first = [&] { return first_of(call, row, sample); };
  const Moments moments = moments_by(own, numbers, is_row, call, call.is_layer, first, scratch);
  if (!is_row) return;
  if (threadIdx.x % group == 0) keep_moments(call, row, moments);
  Bits* out = (Bits*)call.out + dense;
  own.each([&](int i, unsigned further) {
    const float normed = (Type::read(numbers[i].bits[0]) - moments.mean) * moments.rstd;
    out[further] = Type::write(normed * factors[i] + shifts[i]);
  });
}

// kVectors pieces of kBytes a thread.
template <class Way, int kBytes, int kVectors>
__device__ void forward(const AdaptiveNormCall& call) {
  wait_for_inputs();
  let_next_start();
  const bool is_full = call.columns == kVectors * call.group * (kBytes / sizeof(Bits)) &&
                       call.rows == gridDim.x * (blockDim.x / call.group);
  if (is_full) {
    forward_rows<Way, kBytes, kVectors, true>(call);
  } else {
    forward_rows<Way, kBytes, kVectors, false>(call);
  }
}

template <bool kIsGated, int kVectors>
__device__ void forward_ahead(const AdaptiveNormCall& call) {
  wait_for_inputs();
  let_next_start();
  const bool is_full = call.columns == kVectors * call.group * (16 / sizeof(Bits)) &&
                       call.rows == gridDim.x * (blockDim.x / call.group);
  if (is_full) {
    forward_rows_ahead<kIsGated, kVectors, true>(call);
  } else {
    forward_rows_ahead<kIsGated, kVectors, false>(call);
  }
}

// kNumbers a thread. kStep: as of Numbers.
template <class Way, int kNumbers, unsigned kStep>
__device__ void forward_odd(const AdaptiveNormCall& call) {
  wait_for_inputs();
  let_next_start();
  if (kStep == 0 && call.group >= 32) {
    forward_numbers<Way, kNumbers, 32>(call);
  } else {
    forward_numbers<Way, kNumbers, kStep>(call);
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
      modulate<Float, false>(call, factor.data, shift.data, at, values);
    } else {
      modulate<Type, false>(call, factor.data, shift.data, at, values);
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

ADAPTIVE_NORM(forward_usual_2, 1024, 1, forward<Usual<false>, 16, 2>)
ADAPTIVE_NORM(forward_usual_4, 640, 2, forward<Usual<false>, 16, 4>)
ADAPTIVE_NORM(forward_usual_8, 512, 2, forward<Usual<false>, 16, 8>)
ADAPTIVE_NORM(forward_usual_ahead_4, 256, 4, forward_ahead<false, 4>)
ADAPTIVE_NORM(forward_usual_ahead_5, 256, 4, forward_ahead<false, 5>)
ADAPTIVE_NORM(forward_usual_ahead_6, 256, 4, forward_ahead<false, 6>)
ADAPTIVE_NORM(forward_gated_2, 1024, 1, forward<Usual<true>, 16, 2>)
ADAPTIVE_NORM(forward_gated_4, 640, 2, forward<Usual<true>, 16, 4>)
ADAPTIVE_NORM(forward_gated_8, 512, 2, forward<Usual<true>, 16, 8>)
ADAPTIVE_NORM(forward_gated_ahead_4, 256, 4, forward_ahead<true, 4>)
ADAPTIVE_NORM(forward_gated_ahead_5, 256, 4, forward_ahead<true, 5>)
ADAPTIVE_NORM(forward_gated_ahead_6, 256, 4, forward_ahead<true, 6>)
ADAPTIVE_NORM(forward_16_2, 1024, 1, forward<Any, 16, 2>)
ADAPTIVE_NORM(forward_16_4, 512, 2, forward<Any, 16, 4>)
ADAPTIVE_NORM(forward_16_5, 256, 3, forward<Any, 16, 5>)
ADAPTIVE_NORM(forward_16_6, 256, 3, forward<Any, 16, 6>)
ADAPTIVE_NORM(forward_16_8, 512, 1, forward<Any, 16, 8>)
ADAPTIVE_NORM(forward_n_2, 256, 8, forward_odd<Any, 2, 0>)
ADAPTIVE_NORM(forward_n_8, 1024, 1, forward_odd<Any, 8, 0>)
ADAPTIVE_NORM(forward_usual_n, 1024, 1, forward_odd<Usual<false>, 8, 32>)
ADAPTIVE_NORM(forward_gated_n, 1024, 1, forward_odd<Usual<true>, 8, 32>)
ADAPTIVE_NORM(forward_any_16, 1024, 1, forward_any<16>)
ADAPTIVE_NORM(forward_any_n, 1024, 1, forward_any<n>)
