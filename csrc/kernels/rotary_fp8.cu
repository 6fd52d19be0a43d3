// Query and key, normed and turned, and value, rounded to numbers of 8 bits. Compiled when the
// package is built (cmake/compile_kernels.py); rotary_fp8_cuda.cpp launches it.
//
// A row stays in the registers of the threads that share it. They have kHeads heads of one tensor,
// and go from token to token: all that depends on the heads is known before, and a token's cosines
// and sines are read once for all of them. The heads of a token are those of threads that follow
// each other, so that its cosines and sines come from the nearest cache for all but the first.

#include "fp8.cuh"
#include "rotary.cuh"
#include "rotary_fp8_call.h"
#include "threads.cuh"

// Threads that share rows have a slot of each token: `count` heads of a tensor, `apart` from each
// other, so that the threads of a warp read neighbours.
template <int kHeads>
struct Fp8Slot {
  const void* input;
  void* out;
  long long head_stride, batch_stride, token_stride;  // of the input
  unsigned head, heads, apart, count;                 // head: the first one
  unsigned scale, scale_step;                         // of the first head, and on to the next
  unsigned half, pieces;  // `half` as in RotaryAnyCall: 0 where nothing turns
  int norm;               // the index of its weights; -1: there is none

  static __device__ unsigned slots_of(const RotaryHeads& all) {
    return (all.heads + kHeads - 1) / kHeads;
  }
  static __device__ unsigned slots_of_token(const RotaryFp8Call& call) {
    return slots_of(call.turn.query) + slots_of(call.turn.key) + slots_of(call.value);
  }

  __device__ Fp8Slot(const RotaryFp8Call& call, unsigned slot) {
    const auto& turn = call.turn;
    const unsigned of_query = slots_of(turn.query), of_key = slots_of(turn.key);
    const bool is_query = slot < of_query, is_key = !is_query && slot < of_query + of_key;
    const RotaryHeads& all = is_query ? turn.query : is_key ? turn.key : call.value;
    const bool has_scales = !is_query && !is_key && call.value_scales > 1;
    head = is_query ? slot : slot - of_query - (is_key ? 0 : of_key);
    heads = all.heads;
    apart = slots_of(all);
    count = (heads - head + apart - 1) / apart;
    input = all.input;
    out = all.out;
    head_stride = all.head_stride;
    batch_stride = all.batch_stride;
    token_stride = all.token_stride;
    norm = is_query && call.query_weight != nullptr ? 0
           : is_key && call.key_weight != nullptr   ? 1
                                                    : -1;
    scale = is_query ? 0 : is_key ? 1 : 2 + (has_scales ? head : 0);
    scale_step = has_scales ? apart : 0;
    half = is_query || is_key ? turn.half : 0;
    pieces = is_query || is_key ? turn.pieces : call.value_pieces;
  }
};

// The tokens of a thread: from its first one on, each `step`th of all batches'. Mirrored, those
// that come last otherwise come first.
struct Fp8Tokens {
  unsigned batch, token, batch_step, token_step, rounds;
  bool is_mirrored;

  __device__ Fp8Tokens(unsigned first, unsigned step, long long pixels, unsigned tokens,
                       bool is_mirrored)
      : batch(first / tokens),
        token(first % tokens),
        batch_step(step / tokens),
        token_step(step % tokens),
        rounds((pixels - first + step - 1) / step),
        is_mirrored(is_mirrored) {
    if (!is_mirrored) return;
    batch = pixels / tokens - 1 - batch;
    token = tokens - 1 - token;
  }

  __device__ void advance(unsigned tokens) {
    if (is_mirrored) {
      batch -= batch_step + (token < token_step);
      token += (token < token_step ? tokens : 0) - token_step;
      return;
    }
    batch += batch_step;
    token += token_step;
    if (token < tokens) return;
    token -= tokens;
    ++batch;
  }
};

// The two pieces of a row that are one item, as in rotary.cu: half apart, or neighbours.
struct Fp8Item {
  unsigned first, apart;  // apart: the second one less the first; 0: there is no second
  bool has_first;

  Fp8Item() = default;
  __device__ Fp8Item(unsigned half, unsigned pieces, unsigned item, bool is_neighbour) {
    if (item < half) {
      first = is_neighbour ? 2 * item : item;
      apart = is_neighbour ? 1 : half;
      has_first = true;
      return;
    }
    const unsigned copied = pieces - 2 * half, of_first = (copied + 1) / 2;
    first = item + half;
    has_first = item - half < of_first;
    apart = has_first && first + of_first < pieces ? of_first : 0;
  }
};

// The cosines and sines of an item.
template <class Angle, bool kInside, int kWidth>
struct Fp8Angles {
  using Values = float[kWidth];

  Values cos_first, cos_second, sin_first, sin_second;

  __device__ void read(const RotaryAnyCall& call, unsigned batch, unsigned token, unsigned item) {
    constexpr unsigned kPairs = kInside ? kWidth / 2 : kWidth;  // of a piece
    const FactorRow of_first = factor_row(call, item * kPairs, batch, token);
    const FactorRow of_second =
        kInside ? factor_row(call, (item + call.half) * kPairs, batch, token) : of_first;
    read_factors<Angle, kInside>(call, call.cos, of_first, of_second, batch, item, cos_first,
                                 cos_second);
    read_factors<Angle, kInside>(call, call.sin, of_first, of_second, batch, item, sin_first,
                                 sin_second);
  }

  __device__ void turn_item(Values& first, Values& second) const {
    if constexpr (kInside) {
      turn_neighbours(first, cos_first, sin_first, false);
      turn_neighbours(second, cos_second, sin_second, false);
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        turn(first[k], second[k], cos_first[k], cos_second[k], sin_first[k], sin_second[k], false);
      }
    }
  }
};

// What the norms of query and key multiply by, in shared memory.
struct alignas(16) Fp8Weights {
  float of_head[2][kMostHeadSize];
};

template <class Type>
__device__ void read_weights(const RotaryFp8Call& call, Fp8Weights& weights) {
  const void* all[] = {call.query_weight, call.key_weight};
  const unsigned size = call.size;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (all[i] == nullptr) continue;
    for (unsigned k = threadIdx.x; k < size; k += blockDim.x) {
      const float weight = call.is_weight_float
                               ? ((const float*)all[i])[k]
                               : Type::read(((const typename Type::Bits*)all[i])[k]);
      weights.of_head[i][k] = call.zero_centered ? 1 + weight : weight;
    }
  }
}

template <int kWidth>
__device__ void weigh(const float* weight, unsigned piece, float rstd, float (&values)[kWidth]) {
  float factors[kWidth];
  read_piece<Float>(weight, piece, factors);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) values[k] = values[k] * rstd * factors[k];
}

template <int kWidth>
__device__ float squares(const float (&values)[kWidth]) {
  float sum = 0;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) sum = fmaf(values[k], values[k], sum);
  return sum;
}

// Has the compiler read the numbers here and not later, so that the next load takes the place of
// what they are read from, and neither is moved.
template <int kWidth>
__device__ void settle(float (&values)[kWidth]) {
#ifdef __CUDA_ARCH__
#pragma unroll
  for (int k = 0; k < kWidth; ++k) asm volatile("" : "+f"(values[k]));
#endif
}

template <int kWidth>
__device__ void multiply(float (&values)[kWidth], float scale) {
#pragma unroll
  for (int k = 0; k < kWidth; ++k) values[k] *= scale;
}

// A thread's part of its rows: some items, and where those are of any token.
template <class Type, class Angle, bool kInside, int kWidth, int kItems, int kHeads>
struct Fp8Part {
  using Slot = Fp8Slot<kHeads>;
  using Vector = Piece<Type, kWidth>;
  using Values = float[kWidth];

  const RotaryFp8Call& call;
  const typename Type::Bits* input;
  unsigned char* out;
  long long batch_stride, token_stride, head_step;
  unsigned row, out_step;        // bytes of a token's results, and from one head to the next
  unsigned thread, half, count;  // thread: of those that share the rows
  const float* weight;           // of its norm; null: no norm
  Fp8Item items[kItems];
  Fp8Angles<Angle, kInside, kWidth> angles[kItems];
  Vector first[kHeads][kItems], second[kHeads][kItems];  // of the next token

  __device__ Fp8Part(const RotaryFp8Call& call, const Slot& slot, const Fp8Weights& weights)
      : call(call),
        input((const typename Type::Bits*)slot.input + slot.head * slot.head_stride),
        out((unsigned char*)slot.out + (long long)slot.head * slot.pieces * kWidth),
        batch_stride(slot.batch_stride),
        token_stride(slot.token_stride),
        head_step(slot.apart * slot.head_stride),
        row(slot.heads * slot.pieces * kWidth),
        out_step(slot.apart * slot.pieces * kWidth),
        thread(threadIdx.x % call.group),
        half(slot.half),
        count(slot.count),
        weight(slot.norm < 0 ? nullptr : weights.of_head[slot.norm]) {
    const bool is_neighbour = kWidth == 1 && call.turn.is_interleaved;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      items[i] = Fp8Item(half, slot.pieces, item(i), is_neighbour);
#pragma unroll
      for (int head = 0; head < kHeads; ++head) first[head][i] = second[head][i] = {};
    }
    if constexpr (kItems == 1) {
      // Pointers to where the only item begins; a thread that has none has no heads.
      Fp8Item& only = items[0];
      if (!only.has_first) count = 0;
      input += only.first * kWidth;
      out += only.first * kWidth;
      if (weight != nullptr) weight += only.first * kWidth;
      only.first = 0;
      only.has_first = true;
    }
  }

  __device__ unsigned item(int i) const {
    return thread + i * call.group;
  }

  // A token's row of the first head.
  __device__ const typename Type::Bits* row_of(unsigned batch, unsigned token) const {
    return input + batch * batch_stride + token * token_stride;
  }

  __device__ void load(const typename Type::Bits* token, int head) {
    if (head >= count) return;
    const auto* x = (const Vector*)(token + head * head_step);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const Fp8Item& at = items[i];
      if (at.has_first) first[head][i] = load_whole(x + at.first);
      if (at.apart > 0) second[head][i] = load_whole(x + at.first + at.apart);
    }
  }

  // The numbers of what is loaded.
  __device__ void take(int head, Values (&ones)[kItems], Values (&others)[kItems]) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      first[head][i].read(ones[i]);
      second[head][i].read(others[i]);
      settle(ones[i]);
      settle(others[i]);
    }
  }

  __device__ void read_angles(unsigned batch, unsigned token) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (item(i) < half) angles[i].read(call.turn, batch, token, item(i));
    }
  }

  // Each thread of the warp must come here: they add up squares.
  __device__ void norm(Values (&ones)[kItems], Values (&others)[kItems]) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      sum += squares(ones[i]);
      sum += squares(others[i]);
    }
    sum = sum_within_warp(sum, call.group);
    if (weight == nullptr || count == 0) return;
    const float rstd = rsqrtf(sum / call.size + call.eps);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const Fp8Item& at = items[i];
      if (at.has_first) weigh(weight, at.first, rstd, ones[i]);
      if (at.apart > 0) weigh(weight, at.first + at.apart, rstd, others[i]);
    }
  }

  // Turns a row, and writes it unless only its largest magnitude is wanted. Returns that or `most`,
  // what is larger, if it is `searched` for.
  __device__ unsigned finish(unsigned char* y, float scale, bool is_searched, unsigned most,
                             Values (&ones)[kItems], Values (&others)[kItems]) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!items[i].has_first) continue;
      if (item(i) < half) angles[i].turn_item(ones[i], others[i]);
      if (is_searched) most = largest(largest(most, ones[i]), others[i]);
      if (call.descales == nullptr) continue;
      multiply(ones[i], scale);
      multiply(others[i], scale);
      if (call.is_e5m2) {
        write<E5M2>(y, i, ones[i], others[i]);
      } else {
        write<E4M3>(y, i, ones[i], others[i]);
      }
    }
    return most;
  }

  template <class Fp8>
  __device__ void write(unsigned char* y, int i, const Values& one, const Values& other) const {
    using Rounded = Fp8Piece<Fp8, kWidth>;
    auto* pieces = (Rounded*)y + items[i].first;
    pieces[0] = Rounded::of(one);
    if (items[i].apart > 0) pieces[items[i].apart] = Rounded::of(other);
  }
};

// The rows of a thread: the largest magnitude of each head's numbers.
template <bool kHasNorms, class Part, int kHeads>
__device__ void turn_tokens(Part& part, Fp8Tokens at, unsigned rounds, bool is_searched,
                            const float (&scales)[kHeads], unsigned (&most)[kHeads]) {
  constexpr int kItems = sizeof(Part::items) / sizeof(Fp8Item);
  const RotaryFp8Call& call = part.call;
  if (at.rounds > 0) {
    const auto* x = part.row_of(at.batch, at.token);
#pragma unroll
    for (int head = 0; head < kHeads; ++head) part.load(x, head);
  }
  // A warp's threads go round together where they add up squares.
  if (!kHasNorms) rounds = at.rounds;
  for (unsigned round = 0; round < rounds; ++round) {
    const bool is_there = !kHasNorms || round < at.rounds, has_next = round + 1 < at.rounds;
    const unsigned batch = at.batch, token = at.token;
    auto* y = part.out + ((long long)batch * call.turn.tokens + token) * part.row;
    at.advance(call.turn.tokens);
    const auto* next = part.row_of(at.batch, at.token);
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      typename Part::Values ones[kItems], others[kItems];
      part.take(head, ones, others);
      if (has_next) part.load(next, head);
      // Behind the first load, which does not wait for them.
      if (head == 0 && is_there) part.read_angles(batch, token);
      if constexpr (kHasNorms) part.norm(ones, others);
      if (!is_there || head >= part.count) continue;
      most[head] = part.finish(y + head * part.out_step, scales[head], is_searched, most[head],
                               ones, others);
    }
  }
}

// Two passes where no scale is known: the first is for the largest magnitudes alone, and the second
// begins with the rows that the first read last, which are still in the cache.
template <class Type, class Angle, bool kInside, int kWidth, int kItems, int kHeads>
__device__ void rotary_fp8(const RotaryFp8Call& call) {
  using Part = Fp8Part<Type, Angle, kInside, kWidth, kItems, kHeads>;
  __shared__ unsigned most_of[kMostScales];
  __shared__ float scales[kMostScales];
  __shared__ Fp8Weights weights;
  const unsigned count = 2 + call.value_scales;
  const bool is_known = call.scales != nullptr, is_rounded = call.descales != nullptr;
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
    const float most = call.is_e5m2 ? E5M2::kMost : E4M3::kMost;
    most_of[i] = 0;
    scales[i] = !is_rounded ? 1 : is_known ? call.scales[i] : scale_of(call.amax[i], most);
    if (is_rounded && blockIdx.x == 0) call.descales[i] = 1 / scales[i];
  }
  read_weights<Type>(call, weights);
  __syncthreads();
  const bool is_second = is_rounded && !is_known;
  if (call.rows > 0) {
    const unsigned heads = call.turn.query.heads + call.turn.key.heads + call.value.heads;
    const unsigned slots = Part::Slot::slots_of_token(call);
    const unsigned rows_of_block = blockDim.x / call.group;
    const unsigned place = blockIdx.x * rows_of_block + threadIdx.x / call.group;
    // Of each slot so many rows are under way; what is left of the last block has none.
    const unsigned step = gridDim.x * rows_of_block / slots, first = place / slots;
    const long long pixels = call.rows / heads;
    Fp8Tokens tokens(first, step, pixels, call.turn.tokens, is_second);
    if (first >= step) tokens.rounds = 0;
    const typename Part::Slot slot(call, place - first * slots);
    Part part(call, slot, weights);
    float own_scales[kHeads];
    unsigned most[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      own_scales[i] = i < slot.count ? scales[slot.scale + i * slot.scale_step] : 1;
      most[i] = 0;
    }
    const unsigned rounds = (pixels + step - 1) / step;
    if (call.query_weight != nullptr || call.key_weight != nullptr) {
      turn_tokens<true>(part, tokens, rounds, !is_second, own_scales, most);
    } else {
      turn_tokens<false>(part, tokens, rounds, !is_second, own_scales, most);
    }
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      unsigned* all = most_of + slot.scale + i * slot.scale_step;
      if (most[i] > 0 && most[i] > *all) atomicMax(all, most[i]);
    }
  }
  __syncthreads();
  if (is_second) return;
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
    if (most_of[i] > call.amax[i]) atomicMax(call.amax + i, most_of[i]);
  }
}

// Two blocks run on a multiprocessor: all that goes round has a register then, and rows of 32 KB
// are on their way.
#define ROTARY_FP8_KERNEL(name, ...)                     \
  extern "C" __global__ void __launch_bounds__(256, 2)   \
      name(const __grid_constant__ RotaryFp8Call call) { \
    rotary_fp8<__VA_ARGS__>(call);                       \
  }
#define ROTARY_FP8(Type, Angle, name, wide)                                          \
  ROTARY_FP8_KERNEL(rotary_fp8_##name##_##wide, Type, Angle, false, wide, 1, 2)      \
  ROTARY_FP8_KERNEL(rotary_fp8_pairs_##name##_##wide, Type, Angle, true, wide, 1, 2) \
  ROTARY_FP8_KERNEL(rotary_fp8_##name##_1, Type, Angle, false, 1, 4, 1)

ROTARY_FP8(Half, Half, half, 8)
ROTARY_FP8(Half, Float, half_float, 8)
ROTARY_FP8(BFloat16, BFloat16, bfloat16, 8)
ROTARY_FP8(BFloat16, Float, bfloat16_float, 8)
ROTARY_FP8(Float, Float, float, 4)
