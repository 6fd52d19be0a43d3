// Depthwise convolutions of one dimension as in depthwise_conv1d.cu, the length last in memory: a
// row is one channel of one sample. Compiled when the package is built (cmake/compile_kernels.py);
// depthwise_conv1d_cuda.cpp launches them.

#include "depthwise_conv1d.cuh"

namespace {

// Memory is read and written 16 bytes at a time, from addresses that are multiples of that.
struct alignas(16) Unit {
  unsigned words[4];
};
template <class Type>
constexpr int kUnit = sizeof(Unit) / sizeof(typename Type::Bits);
// Whether a word has two numbers.
template <class Type>
constexpr bool kHasHalves = sizeof(typename Type::Bits) == 2;

template <class Type>
struct Row {
  using Bits = typename Type::Bits;
  const Bits* first;
  int length;

  __device__ Row(const void* data, long long row, int length)
      : first((const Bits*)data + row * length), length(length) {
  }
  // Zero beyond either end.
  __device__ Bits operator[](int at) const {
    return (unsigned)at < (unsigned)length ? first[at] : (Bits)0;
  }
  // By how many numbers that one is behind a unit's first.
  __device__ int behind(int at) const {
    return ((unsigned)(unsigned long long)first / sizeof(Bits) + at) % kUnit<Type>;
  }
  // The unit that begins there.
  __device__ Unit read_unit(int at) const {
    if ((unsigned)at < (unsigned)max(length - kUnit<Type> + 1, 0))
      return *(const Unit*)(first + at);
    Unit unit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kHasHalves<Type>) {
        unit.words[i] = (*this)[at + 2 * i] | (unsigned)(*this)[at + 2 * i + 1] << 16;
      } else {
        unit.words[i] = __float_as_uint((*this)[at + i]);
      }
    }
    return unit;
  }
};

// Reads a row run by run, from any number on: whole units, of which it leaves out what lies before.
template <class Type>
class Runs {
 public:
  __device__ Runs(const Row<Type>& row, int start)
      : row_(row), behind_(row.behind(start)), next_(start - behind_) {
    keep(0, row_.read_unit(next_));
  }

  __device__ void read(float (&values)[kRun]) {
#pragma unroll
    for (int unit = 1; unit <= kUnits; ++unit) keep(unit, row_.read_unit(next_ += kUnit<Type>));
    // As many words further as lie before the run, by the digits of that number.
    const int words = kHasHalves<Type> ? behind_ / 2 : behind_;
    constexpr int kLeft = kWords + kHasHalves<Type>;
    unsigned by_two[kLeft + 1], by_one[kLeft];
#pragma unroll
    for (int i = 0; i <= kLeft; ++i) by_two[i] = words & 2 ? words_[i + 2] : words_[i];
#pragma unroll
    for (int i = 0; i < kLeft; ++i) by_one[i] = words & 1 ? by_two[i + 1] : by_two[i];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (kHasHalves<Type>) {
        const unsigned word = __funnelshift_r(by_one[i], by_one[i + 1], behind_ % 2 * 16);
        Type::read(word, values[2 * i], values[2 * i + 1]);
      } else {
        values[i] = __uint_as_float(by_one[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) words_[i] = words_[4 * kUnits + i];
  }

 private:
  static constexpr int kUnits = kRun / kUnit<Type>, kWords = 4 * kUnits;

  __device__ void keep(int place, const Unit& unit) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words_[4 * place + i] = unit.words[i];
  }

  Row<Type> row_;
  int behind_, next_;
  unsigned words_[kWords + 4];  // between two runs only the first unit is of use
};

// Writes those of a run's numbers that the row has.
template <class Type>
__device__ void write_run(void* data, long long row, int length, int start,
                          const float (&values)[kRun]) {
  using Vector = Piece<Type, kRun>;
  auto* const at = (typename Type::Bits*)data + row * length + start;
  if (start >= 0 && start <= length - kRun) {
    *(Vector*)at = Vector::of(values);
    return;
  }
#pragma unroll
  for (int r = 0; r < kRun; ++r) {
    if ((unsigned)(start + r) < (unsigned)length) at[r] = Type::write(values[r]);
  }
}

// The inputs that a run of outputs sees at kRun taps, of which the next kRun have all but one in
// common with them.
template <class Type>
class Window {
 public:
  __device__ Window(const Row<Type>& input, const DepthwiseConv1dShape& shape, int start, int tap)
      : runs_(input, start - shape.padding + tap) {
    runs_.read(next_);
  }
  // Calls add(tap, inputs) for the next kRun taps, or for `count` of them.
  template <class Add>
  __device__ void for_each_tap(int count, const Add& add) {
#pragma unroll
    for (int r = 0; r < kRun; ++r) now_[r] = next_[r];
    if (count > 1) runs_.read(next_);
#pragma unroll
    for (int t = 0; t < kRun; ++t) {
      if (t >= count) break;
      float values[kRun];
#pragma unroll
      for (int r = 0; r < kRun; ++r) values[r] = r + t < kRun ? now_[r + t] : next_[r + t - kRun];
      add(t, values);
    }
  }

 private:
  Runs<Type> runs_;
  float now_[kRun], next_[kRun];
};

// The same where the taps lie apart.
template <class Type>
class Apart {
 public:
  __device__ Apart(const Row<Type>& input, const DepthwiseConv1dShape& shape, int start, int tap)
      : input_(input), dilation_(shape.dilation), at_(start - shape.padding + tap * dilation_) {
  }
  template <class Add>
  __device__ void for_each_tap(int count, const Add& add) {
#pragma unroll
    for (int t = 0; t < kRun; ++t, at_ += dilation_) {
      if (t >= count) break;
      float values[kRun];
      Runs<Type>(input_, at_).read(values);
      add(t, values);
    }
  }

 private:
  Row<Type> input_;
  int dilation_, at_;
};

// The weight of one channel, kRun taps at a time.
template <class Type>
struct Factors {
  const typename Type::Bits* first;
  int taps;
  bool is_turned;
  float values[kRun];  // of the taps that were read last

  __device__ Factors(const DepthwiseConv1dCall& call, int channel)
      : first((const typename Type::Bits*)call.weight + (long long)channel * call.shape.taps),
        taps(call.shape.taps),
        is_turned(call.is_turned) {
  }
  __device__ void read(int begin) {
    const auto* at = first + (is_turned ? taps - kRun - begin : begin);
    float found[kRun];
#pragma unroll
    for (int t = 0; t < kRun; ++t) {
      const bool is_there = begin + (is_turned ? kRun - 1 - t : t) < taps;
      found[t] = is_there ? Type::read(at[t]) : 0;
    }
#pragma unroll
    for (int t = 0; t < kRun; ++t) values[t] = is_turned ? found[kRun - 1 - t] : found[t];
  }
};

template <template <class> class Inputs, class Type>
__device__ void add_taps(const DepthwiseConv1dShape& shape, const Row<Type>& input, int start,
                         Factors<Type>& factors, float (&sums)[kRun]) {
  Inputs<Type> inputs(input, shape, start, 0);
  for (int begin = 0; begin < shape.taps; begin += kRun) {
    if (shape.taps > kRun) factors.read(begin);
    inputs.for_each_tap(shape.taps - begin, [&](int t, const float (&values)[kRun]) {
#pragma unroll
      for (int r = 0; r < kRun; ++r) sums[r] += factors.values[t] * values[r];
    });
  }
}

__device__ void activate(int activation, float (&run)[kRun]) {
  switch (activation) {
#define CASE(name, Name) \
  case k##Name: _Pragma("unroll") for (float& value : run) value = Name::of(value).x; break;
    CUDNN_OPS_ACTIVATIONS(CASE)
#undef CASE
  }
}

// `pieces` threads share a channel's row, each has a run of its outputs: of one sample after
// another. A row's first run begins where the unit of its first output does, which may be before
// it.
template <class Type>
__device__ void rows_forward(const DepthwiseConv1dCall& call) {
  const auto& shape = call.shape;
  const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
  const int channel = (int)(index / shape.pieces), run = (int)(index % shape.pieces);
  const int length = shape.out_length;
  if (channel >= shape.channels) return;
  Factors<Type> factors(call, channel);
  if (shape.taps <= kRun) factors.read(0);
  float bias = 0;
  if (call.bias != nullptr) bias = Type::read(((const typename Type::Bits*)call.bias)[channel]);
  for (long long sample = blockIdx.y; sample < shape.batch; sample += gridDim.y) {
    const long long row = sample * shape.channels + channel;
    const int start = run * kRun - Row<Type>(call.out, row, length).behind(0);
    if (start >= length) continue;
    const Row<Type> input(call.input, row, shape.length);
    float sums[kRun] = {};
    if (shape.dilation == 1) {
      add_taps<Window>(shape, input, start, factors, sums);
    } else {
      add_taps<Apart>(shape, input, start, factors, sums);
    }
#pragma unroll
    for (int r = 0; r < kRun; ++r) sums[r] += bias;
    if (call.residual != nullptr) {
      float residual[kRun];
      Runs<Type>(Row<Type>(call.residual, row, length), start).read(residual);
#pragma unroll
      for (int r = 0; r < kRun; ++r) sums[r] += residual[r];
    }
    if (call.before != nullptr) write_run<Type>(call.before, row, length, start, sums);
    activate(call.activation, sums);
    write_run<Type>(call.out, row, length, start, sums);
  }
}

// Where the stride is not 1: `pieces` threads share a row, and each has outputs that lie as far
// apart, whose inputs no two of them have in common.
template <class Type>
__device__ void strided_rows_forward(const DepthwiseConv1dCall& call) {
  const auto& shape = call.shape;
  const int lanes = shape.pieces, lane = threadIdx.x % lanes, tile = lanes * kRun;
  const long long row = (long long)blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes;
  if (row >= shape.batch * shape.channels) return;
  const int channel = (int)(row % shape.channels);
  const Row<Type> input(call.input, row, shape.length);
  const auto* weight = (const typename Type::Bits*)call.weight + (long long)channel * shape.taps;
  float bias[1] = {};
  if (call.bias != nullptr) bias[0] = Type::read(((const typename Type::Bits*)call.bias)[channel]);
  for (int start = blockIdx.y * tile; start < shape.out_length; start += gridDim.y * tile) {
    float sums[kRun][1] = {};
#pragma unroll 2
    for (int tap = 0; tap < shape.taps; ++tap) {
      const float factor = Type::read(weight[call.is_turned ? shape.taps - 1 - tap : tap]);
      const int first = (start + lane) * shape.stride - shape.padding + tap * shape.dilation;
#pragma unroll
      for (int r = 0; r < kRun; ++r) {
        sums[r][0] += factor * Type::read(input[first + r * lanes * shape.stride]);
      }
    }
    const int count = (shape.out_length - start - lane + lanes - 1) / lanes;
    finish_run<Type, 1>(call, sums, bias, row * shape.out_length + start + lane, lanes, count);
  }
}

// The sums of all threads of a block, for the channel's taps from `tap` on.
template <class Type>
__device__ void write_sums(const DepthwiseConv1dWeightCall& call, int channel, int tap,
                           float (&sums)[kTaps]) {
  __shared__ float by_warp[8][kTaps];
  const auto& shape = call.shape;
#pragma unroll
  for (int t = 0; t < kTaps; ++t) {
#pragma unroll
    for (int other = 16; other > 0; other /= 2) {
      sums[t] += __shfl_xor_sync(0xffffffff, sums[t], other);
    }
    if (threadIdx.x % 32 == 0) by_warp[threadIdx.x / 32][t] = sums[t];
  }
  __syncthreads();
  if (threadIdx.x >= kTaps || tap + (int)threadIdx.x >= shape.taps) return;
  float sum = 0;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += by_warp[warp][threadIdx.x];
  write_sum<Type>(call, (long long)channel * shape.taps + tap + threadIdx.x, sum);
}

template <template <class> class Inputs, class Type>
__device__ void add_products(const DepthwiseConv1dShape& shape, const Row<Type>& input,
                             const Row<Type>& grad_out, int start, int tap, float (&sums)[kTaps]) {
  static_assert(kTaps == kRun);
  float grad[kRun];
  Runs<Type>(grad_out, start).read(grad);
  const bool is_whole = start >= 0 && start <= grad_out.length - kRun;
  Inputs<Type> inputs(input, shape, start, tap);
  inputs.for_each_tap(shape.taps - tap, [&](int t, const float (&values)[kRun]) {
    if (is_whole) {
#pragma unroll
      for (int r = 0; r < kRun; ++r) sums[t] += grad[r] * values[r];
    } else {
#pragma unroll
      for (int r = 0; r < kRun; ++r) {
        // What no output saw does not count, not even an infinity times zero.
        if ((unsigned)(start + r) < (unsigned)grad_out.length) sums[t] += grad[r] * values[r];
      }
    }
  });
}

// A block has kTaps of a channel's taps. Its threads have runs of that channel's outputs, as
// rows_forward(), of one sample after another.
template <class Type>
__device__ void rows_of_weight(const DepthwiseConv1dWeightCall& call) {
  const auto& shape = call.shape;
  const int channel = blockIdx.x % shape.channels, tap = blockIdx.x / shape.channels * kTaps;
  const unsigned runs = shape.pieces, step = gridDim.y * blockDim.x;
  const unsigned first = blockIdx.y * blockDim.x + threadIdx.x;
  float sums[kTaps] = {};
  unsigned run = first % runs;
  for (long long sample = first / runs; sample < shape.batch;) {
    const long long row = sample * shape.channels + channel;
    const Row<Type> input(call.input, row, shape.length);
    const Row<Type> grad_out(call.grad_out, row, shape.out_length);
    const int start = (int)run * kRun - grad_out.behind(0);
    if (start < shape.out_length) {
      if (shape.dilation == 1) {
        add_products<Window>(shape, input, grad_out, start, tap, sums);
      } else {
        add_products<Apart>(shape, input, grad_out, start, tap, sums);
      }
    }
    run += step % runs;
    sample += step / runs;
    if (run >= runs) run -= runs, ++sample;
  }
  write_sums<Type>(call, channel, tap, sums);
}

// The same where the stride is not 1: a warp has kChunk outputs of a sample at once.
template <class Type>
__device__ void strided_rows_of_weight(const DepthwiseConv1dWeightCall& call) {
  const auto& shape = call.shape;
  const int channel = blockIdx.x % shape.channels, tap = blockIdx.x / shape.channels * kTaps;
  const int lanes = shape.pieces, lane = threadIdx.x % lanes, at_once = blockDim.x / lanes;
  const int chunks = (shape.out_length + kChunk - 1) / kChunk;  // of a row
  const long long all = shape.batch * chunks, step = (long long)gridDim.y * at_once;
  float sums[kTaps] = {};
  for (long long at = (long long)blockIdx.y * at_once + threadIdx.x / lanes; at < all; at += step) {
    const long long sample = at / chunks, row = sample * shape.channels + channel;
    const Row<Type> input(call.input, row, shape.length);
    const Row<Type> grad_out(call.grad_out, row, shape.out_length);
    const int start = (int)(at - sample * chunks) * kChunk;
    const int end = min(start + kChunk, shape.out_length);
#pragma unroll 2
    for (int i = start + lane; i < end; i += lanes) {
      const float grad = Type::read(grad_out[i]);
      const int from = i * shape.stride - shape.padding + tap * shape.dilation;
#pragma unroll
      for (int t = 0; t < kTaps; ++t) {
        sums[t] += grad * Type::read(input[from + t * shape.dilation]);
      }
    }
  }
  write_sums<Type>(call, channel, tap, sums);
}

}  // namespace

#define KERNELS(Type, suffix)                                                                   \
  KERNEL(rows_##suffix, DepthwiseConv1dCall, rows_forward<Type>, (256, 4))                      \
  KERNEL(strided_rows_##suffix, DepthwiseConv1dCall, strided_rows_forward<Type>, (256, 4))      \
  KERNEL(weight_rows_##suffix, DepthwiseConv1dWeightCall, rows_of_weight<Type>, (256, 4))       \
  KERNEL(weight_strided_rows_##suffix, DepthwiseConv1dWeightCall, strided_rows_of_weight<Type>, \
         (256, 4))

KERNELS(Half, half)
KERNELS(BFloat16, bfloat16)
KERNELS(Float, float)
