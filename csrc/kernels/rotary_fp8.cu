// Query and key, normed and turned, and value, rounded to numbers of 8 bits. Compiled when the
// package is built (cmake/compile_kernels.py); rotary_fp8_cuda.cpp launches it.
//
// A row stays in the registers of the threads that share it. They have one head of one tensor, and
// go from token to token: all that depends on the head is known before. The heads of a token are
// those of threads that follow each other, so that its cosines and sines come from the nearest
// cache for all but the first.

#include "fp8.cuh"
#include "rotary.cuh"
#include "rotary_fp8_call.h"
#include "threads.cuh"

// Which head of which tensor a thread has rows of, and where they are.
struct Fp8Head {
  const void *input, *weight;
  void* out;
  long long head_stride, batch_stride, token_stride;  // of the input
  unsigned head, heads, scale;
  unsigned half, pieces;  // `half` as in RotaryAnyCall: 0 where nothing turns

  __device__ Fp8Head(const RotaryFp8Call& call, unsigned any_head) {
    const auto& turn = call.turn;
    const unsigned queries = turn.query.heads, keys = turn.key.heads;
    const bool is_query = any_head < queries, is_key = !is_query && any_head < queries + keys;
    const RotaryHeads& all = is_query ? turn.query : is_key ? turn.key : call.value;
    head = is_query ? any_head : any_head - queries - (is_key ? 0 : keys);
    heads = all.heads;
    input = all.input;
    out = all.out;
    head_stride = all.head_stride;
    batch_stride = all.batch_stride;
    token_stride = all.token_stride;
    weight = is_query ? call.query_weight : is_key ? call.key_weight : nullptr;
    scale = is_query ? 0 : is_key ? 1 : 2 + (call.value_scales > 1 ? head : 0);
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
  unsigned first, second;
  bool is_turned, has_first, has_second;

  Fp8Item() = default;
  __device__ Fp8Item(const Fp8Head& row, unsigned item, bool is_neighbour) {
    is_turned = item < row.half;
    if (is_turned) {
      first = is_neighbour ? 2 * item : item;
      second = is_neighbour ? 2 * item + 1 : item + row.half;
      has_first = has_second = true;
      return;
    }
    const unsigned copied = row.pieces - 2 * row.half, apart = (copied + 1) / 2;
    first = item + row.half;
    second = first + apart;
    has_first = item - row.half < apart;
    has_second = has_first && second < row.pieces;
  }
};

template <class Type, int kWidth>
__device__ void weigh(const RotaryFp8Call& call, const void* weight, unsigned piece, float rstd,
                      float (&values)[kWidth]) {
  float factors[kWidth];
  if (call.is_weight_float) {
    read_piece<Float>(weight, piece, factors);
  } else {
    read_piece<Type>(weight, piece, factors);
  }
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    values[k] = values[k] * rstd * (call.zero_centered ? 1 + factors[k] : factors[k]);
  }
}

template <int kWidth>
__device__ float squares(const float (&values)[kWidth]) {
  float sum = 0;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) sum = fmaf(values[k], values[k], sum);
  return sum;
}

template <class Angle, bool kInside, int kWidth>
__device__ void turn_item(const RotaryAnyCall& call, unsigned batch, unsigned token, unsigned item,
                          float (&first)[kWidth], float (&second)[kWidth]) {
  constexpr unsigned kPairs = kInside ? kWidth / 2 : kWidth;  // of a piece
  const FactorRow of_first = factor_row(call, item * kPairs, batch, token);
  const FactorRow of_second =
      kInside ? factor_row(call, (item + call.half) * kPairs, batch, token) : of_first;
  float cos_first[kWidth], cos_second[kWidth], sin_first[kWidth], sin_second[kWidth];
  read_factors<Angle, kInside>(call, call.cos, of_first, of_second, batch, item, cos_first,
                               cos_second);
  read_factors<Angle, kInside>(call, call.sin, of_first, of_second, batch, item, sin_first,
                               sin_second);
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

template <int kWidth>
__device__ void put_fp8(void* out, long long piece, float scale, bool is_e5m2,
                        float (&values)[kWidth]) {
#pragma unroll
  for (int k = 0; k < kWidth; ++k) values[k] *= scale;
  if (is_e5m2) {
    ((Fp8Piece<E5M2, kWidth>*)out)[piece] = Fp8Piece<E5M2, kWidth>::of(values);
  } else {
    ((Fp8Piece<E4M3, kWidth>*)out)[piece] = Fp8Piece<E4M3, kWidth>::of(values);
  }
}

// A thread's part of its head's rows: some items, and where those are of any token.
template <class Type, class Angle, bool kInside, int kWidth, int kItems>
struct Fp8Part {
  using Vector = Piece<Type, kWidth>;
  using Values = float[kWidth];

  const RotaryFp8Call& call;
  const typename Type::Bits* input;
  unsigned char* out;
  const void* weight;
  long long batch_stride, token_stride;
  unsigned row;  // bytes of a token's results
  Fp8Item items[kItems];
  Vector first[kItems], second[kItems];  // of the next token

  __device__ Fp8Part(const RotaryFp8Call& call, const Fp8Head& head)
      : call(call),
        input((const typename Type::Bits*)head.input + head.head * head.head_stride),
        out((unsigned char*)head.out + (long long)head.head * head.pieces * kWidth),
        weight(head.weight),
        batch_stride(head.batch_stride),
        token_stride(head.token_stride),
        row(head.heads * head.pieces * kWidth) {
    const bool is_neighbour = kWidth == 1 && call.turn.is_interleaved;
#pragma unroll
    for (int i = 0; i < kItems; ++i) items[i] = Fp8Item(head, item(i), is_neighbour);
  }

  __device__ unsigned item(int i) const {
    return threadIdx.x % call.group + i * call.group;
  }

  __device__ void load(unsigned batch, unsigned token) {
    const auto* x = (const Vector*)(input + batch * batch_stride + token * token_stride);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (items[i].has_first) first[i] = load_whole(x + items[i].first);
      if (items[i].has_second) second[i] = load_whole(x + items[i].second);
    }
  }

  // The numbers of what is loaded.
  __device__ void take(Values (&ones)[kItems], Values (&others)[kItems]) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      first[i].read(ones[i]);
      second[i].read(others[i]);
    }
  }

  // The thread's part of the sum.
  __device__ float sum_squares(const Values (&ones)[kItems], const Values (&others)[kItems]) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (items[i].has_first) sum += squares(ones[i]);
      if (items[i].has_second) sum += squares(others[i]);
    }
    return sum;
  }

  __device__ void norm(float rstd, Values (&ones)[kItems], Values (&others)[kItems]) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (items[i].has_first) weigh<Type>(call, weight, items[i].first, rstd, ones[i]);
      if (items[i].has_second) weigh<Type>(call, weight, items[i].second, rstd, others[i]);
    }
  }

  // Turns the row, and writes it unless only its largest magnitude is wanted, which it returns.
  __device__ unsigned finish(unsigned batch, unsigned token, float scale, Values (&ones)[kItems],
                             Values (&others)[kItems]) const {
    unsigned most = 0;
    auto* y = out + ((long long)batch * call.turn.tokens + token) * row;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!items[i].has_first) continue;
      if (items[i].is_turned) {
        turn_item<Angle, kInside>(call.turn, batch, token, item(i), ones[i], others[i]);
      }
      most = largest(most, ones[i]);
      if (items[i].has_second) most = largest(most, others[i]);
      if (call.descales == nullptr) continue;
      put_fp8(y, items[i].first, scale, call.is_e5m2, ones[i]);
      if (items[i].has_second) {
        put_fp8(y, items[i].second, scale, call.is_e5m2, others[i]);
      }
    }
    return most;
  }
};

// The rows of a thread's head: the largest magnitude of its numbers.
template <class Part>
__device__ unsigned turn_tokens(const RotaryFp8Call& call, const Fp8Head& head, Fp8Tokens at,
                                unsigned rounds, float scale) {
  constexpr int kItems = sizeof(Part::items) / sizeof(Fp8Item);
  Part part(call, head);
  if (at.rounds > 0) part.load(at.batch, at.token);
  unsigned most = 0;
  // A warp's threads go round together: they add up squares.
  for (unsigned round = 0; round < rounds; ++round) {
    const unsigned batch = at.batch, token = at.token;
    typename Part::Values ones[kItems], others[kItems];
    part.take(ones, others);
    at.advance(call.turn.tokens);
    if (round + 1 < at.rounds) part.load(at.batch, at.token);
    if (call.query_weight != nullptr || call.key_weight != nullptr) {
      const float sum = sum_within_warp(part.sum_squares(ones, others), call.group);
      if (part.weight != nullptr) part.norm(rsqrtf(sum / call.size + call.eps), ones, others);
    }
    if (round >= at.rounds) continue;
    const unsigned own = part.finish(batch, token, scale, ones, others);
    most = own > most ? own : most;
  }
  return most;
}

// Two passes where no scale is known: the first is for the largest magnitudes alone, and the second
// begins with the rows that the first read last, which are still in the cache.
template <class Type, class Angle, bool kInside, int kWidth, int kItems>
__device__ void rotary_fp8(const RotaryFp8Call& call) {
  using Part = Fp8Part<Type, Angle, kInside, kWidth, kItems>;
  __shared__ unsigned most_of[kMostScales];
  __shared__ float scales[kMostScales];
  const unsigned count = 2 + call.value_scales;
  const bool is_known = call.scales != nullptr, is_rounded = call.descales != nullptr;
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
    const float most = call.is_e5m2 ? E5M2::kMost : E4M3::kMost;
    most_of[i] = 0;
    scales[i] = !is_rounded ? 1 : is_known ? call.scales[i] : scale_of(call.amax[i], most);
    if (is_rounded && blockIdx.x == 0) call.descales[i] = 1 / scales[i];
  }
  __syncthreads();
  const bool is_second = is_rounded && !is_known;
  if (call.rows > 0) {
    const unsigned heads = call.turn.query.heads + call.turn.key.heads + call.value.heads;
    const unsigned rows_of_block = blockDim.x / call.group;
    const unsigned place = blockIdx.x * rows_of_block + threadIdx.x / call.group;
    // Of each head so many rows are under way; what is left of the last block has none.
    const unsigned step = gridDim.x * rows_of_block / heads, first = place / heads;
    const long long pixels = call.rows / heads;
    Fp8Tokens tokens(first, step, pixels, call.turn.tokens, is_second);
    if (first >= step) tokens.rounds = 0;
    const Fp8Head head(call, place - first * heads);
    const unsigned most =
        turn_tokens<Part>(call, head, tokens, (pixels + step - 1) / step, scales[head.scale]);
    if (!is_second && most > most_of[head.scale]) atomicMax(most_of + head.scale, most);
  }
  __syncthreads();
  if (is_second) return;
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
    if (most_of[i] > call.amax[i]) atomicMax(call.amax + i, most_of[i]);
  }
}

#define ROTARY_FP8_KERNEL(name, ...)                     \
  extern "C" __global__ void __launch_bounds__(256, 3)   \
      name(const __grid_constant__ RotaryFp8Call call) { \
    rotary_fp8<__VA_ARGS__>(call);                       \
  }
#define ROTARY_FP8(Type, Angle, name, wide)                                       \
  ROTARY_FP8_KERNEL(rotary_fp8_##name##_##wide, Type, Angle, false, wide, 1)      \
  ROTARY_FP8_KERNEL(rotary_fp8_pairs_##name##_##wide, Type, Angle, true, wide, 1) \
  ROTARY_FP8_KERNEL(rotary_fp8_##name##_1, Type, Angle, false, 1, 4)

ROTARY_FP8(Half, Half, half, 8)
ROTARY_FP8(Half, Float, half_float, 8)
ROTARY_FP8(BFloat16, BFloat16, bfloat16, 8)
ROTARY_FP8(BFloat16, Float, bfloat16_float, 8)
ROTARY_FP8(Float, Float, float, 4)
