#include "kernels/adaptive_norm.h"

#include "adaptive_norm_backward_bfloat16_images.h"
#include "adaptive_norm_backward_float_images.h"
#include "adaptive_norm_backward_half_images.h"
#include "adaptive_norm_forward_bfloat16_images.h"
#include "adaptive_norm_forward_float_images.h"
#include "adaptive_norm_forward_half_images.h"
#include "kernels/adaptive_norm_call.h"
#include "kernels/adaptive_norm_launch.h"
#include "kernels/device_kernel.h"
#include "kernels/tensor_rows.h"

#include <ATen/core/DimVector.h>
#include <ATen/cuda/EmptyTensor.h>

#include <algorithm>
#include <limits>

namespace cudnn_ops {
namespace {

// By the number of a thread's pieces: 2, 4 and 8, and for operands of any kind 5 and 6 behind them.
// Those that send for what rows are modulated by are for 4, 5 and 6.
struct WideKernels {
  DeviceKernel any[5], usual[3], gated[3], ahead[3], gated_ahead[3];
};

// By their pieces: 16 bytes, and one number.
struct ForwardKernels {
  WideKernels wide;
  DeviceKernel narrow[2], any[2];
  DeviceKernel usual, gated;  // narrow ones of usual operands, that warps share
};

int index_of(unsigned vectors) {
  const bool is_even = vectors == 2 || vectors == 4 || vectors == 8;
  return static_cast<int>(is_even ? vectors / 4 : vectors - 2);
}

// First by whether they are gated.
struct BackwardKernels {
  DeviceKernel wide[5], gated_wide[4], odd[2][2], single[2][4];  // by the pieces of a thread
  DeviceKernel blocks[2], rows[2], sums[2][2], totals[2];
};

#define CUDNN_OPS_KERNEL(images, name) {images, "adaptive_norm_" name, true}
#define CUDNN_OPS_EVEN(images, name)                                        \
  CUDNN_OPS_KERNEL(images, name "_2"), CUDNN_OPS_KERNEL(images, name "_4"), \
      CUDNN_OPS_KERNEL(images, name "_8")
#define CUDNN_OPS_AHEAD(images, name)                                        \
  {CUDNN_OPS_KERNEL(images, name "_4"), CUDNN_OPS_KERNEL(images, name "_5"), \
   CUDNN_OPS_KERNEL(images, name "_6")}
#define CUDNN_OPS_FORWARD(images)                                                           \
  {{{CUDNN_OPS_EVEN(images, "forward_16"), CUDNN_OPS_KERNEL(images, "forward_16_5"),        \
     CUDNN_OPS_KERNEL(images, "forward_16_6")},                                             \
    {CUDNN_OPS_EVEN(images, "forward_usual")},                                              \
    {CUDNN_OPS_EVEN(images, "forward_gated")},                                              \
    CUDNN_OPS_AHEAD(images, "forward_usual_ahead"),                                         \
    CUDNN_OPS_AHEAD(images, "forward_gated_ahead")},                                        \
   {CUDNN_OPS_KERNEL(images, "forward_n_2"), CUDNN_OPS_KERNEL(images, "forward_n_8")},      \
   {CUDNN_OPS_KERNEL(images, "forward_any_16"), CUDNN_OPS_KERNEL(images, "forward_any_n")}, \
   CUDNN_OPS_KERNEL(images, "forward_usual_n"),                                             \
   CUDNN_OPS_KERNEL(images, "forward_gated_n")}
#define CUDNN_OPS_BOTH(images, name) \
  {CUDNN_OPS_KERNEL(images, name "_16"), CUDNN_OPS_KERNEL(images, name "_n")}
#define CUDNN_OPS_WIDE(images, name)                                              \
  CUDNN_OPS_KERNEL(images, name "_16_1"), CUDNN_OPS_KERNEL(images, name "_16_2"), \
      CUDNN_OPS_KERNEL(images, name "_16_3"), CUDNN_OPS_KERNEL(images, name "_16_4")
#define CUDNN_OPS_ODD(images, name) \
  {CUDNN_OPS_KERNEL(images, name "_odd_8"), CUDNN_OPS_KERNEL(images, name "_odd_32")}
#define CUDNN_OPS_SINGLE(images, name)                                       \
  {CUDNN_OPS_KERNEL(images, name "_1"), CUDNN_OPS_KERNEL(images, name "_2"), \
   CUDNN_OPS_KERNEL(images, name "_4"), CUDNN_OPS_KERNEL(images, name "_odd")}
// Their blocks wait for each other.
#define CUDNN_OPS_BLOCKS(images, name) {images, "adaptive_norm_" name, true, true}
#define CUDNN_OPS_BACKWARD(images)                                                                \
  {                                                                                               \
    {CUDNN_OPS_WIDE(images, "backward"), CUDNN_OPS_KERNEL(images, "backward_16_5")},              \
        {CUDNN_OPS_WIDE(images, "gated_backward")},                                               \
        {CUDNN_OPS_ODD(images, "backward"), CUDNN_OPS_ODD(images, "gated_backward")},             \
        {CUDNN_OPS_SINGLE(images, "backward_single"),                                             \
         CUDNN_OPS_SINGLE(images, "gated_backward_single")},                                      \
        {CUDNN_OPS_BLOCKS(images, "backward_blocks"),                                             \
         CUDNN_OPS_BLOCKS(images, "gated_backward_blocks")},                                      \
        CUDNN_OPS_BOTH(images, "backward_rows"),                                                  \
        {CUDNN_OPS_BOTH(images, "backward_sums"), CUDNN_OPS_BOTH(images, "gated_backward_sums")}, \
    {                                                                                             \
      CUDNN_OPS_KERNEL(images, "totals"), CUDNN_OPS_KERNEL(images, "gated_totals")                \
    }                                                                                             \
  }

const ForwardKernels& forward_kernels(int type) {
  static const ForwardKernels all[3] = {CUDNN_OPS_FORWARD(kAdaptiveNormForwardHalfImages),
                                        CUDNN_OPS_FORWARD(kAdaptiveNormForwardBFloat16Images),
                                        CUDNN_OPS_FORWARD(kAdaptiveNormForwardFloatImages)};
  return all[type];
}

const BackwardKernels& backward_kernels(int type) {
  static const BackwardKernels all[3] = {CUDNN_OPS_BACKWARD(kAdaptiveNormBackwardHalfImages),
                                         CUDNN_OPS_BACKWARD(kAdaptiveNormBackwardBFloat16Images),
                                         CUDNN_OPS_BACKWARD(kAdaptiveNormBackwardFloatImages)};
  return all[type];
}

template <class T = void>
T* data_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
}

bool is_float(const at::Tensor& tensor) {
  return tensor.defined() && tensor.scalar_type() == at::kFloat;
}

at::Tensor dense(const at::Tensor& parameter) {
  return parameter.defined() ? parameter.contiguous() : parameter;
}

at::Tensor allocate(at::IntArrayRef sizes, const at::Tensor& like) {
  return at::detail::empty_cuda(sizes, at::kFloat, like.device(), std::nullopt);
}

// Which rows share their gate, scale and shift: those of a sample, in the trailing dimensions over
// which all of these are broadcast.
class Samples {
 public:
  explicit Samples(const AdaptiveNormOfRows& args) : input_(args.input) {
    for (const auto* tensor : {&args.gate, &args.scale, &args.shift}) {
      for (int64_t dim = counted_; tensor->defined() && dim < input_.dim() - 1; ++dim) {
        if (size_of(*tensor, dim) != 1) counted_ = dim + 1;
      }
    }
  }

  int64_t count() const {
    int64_t count = 1;
    for (int64_t dim = 0; dim < counted_; ++dim) count *= input_.size(dim);
    return count;
  }

  // The rows of gate, scale or shift, one for each sample.
  TensorRows rows_of(at::Tensor tensor) const {
    if (!tensor.defined()) return {tensor, 0};
    if (tensor.size(-1) != 1 && tensor.stride(-1) != 1) tensor = tensor.contiguous();
    at::DimVector strides;
    for (int64_t dim = 0; dim < counted_; ++dim) {
      strides.push_back(size_of(tensor, dim) == 1 ? 0 : tensor.stride(own(tensor, dim)));
    }
    const auto sizes = input_.sizes().slice(0, static_cast<size_t>(counted_));
    if (const auto rows = describe_rows(sizes, strides)) return {std::move(tensor), *rows};
    at::DimVector full(sizes.begin(), sizes.end());
    full.push_back(tensor.size(-1));
    strides.push_back(tensor.stride(-1));
    return {tensor.as_strided(full, strides).contiguous(), counted_};
  }

  // Memory for the gradient of gate, scale or shift: the gradient itself, where each sample has
  // numbers of its own.
  at::Tensor memory_for(const at::Tensor& grad) const {
    if (!grad.defined() || broadcast_dims(grad).empty()) return grad;
    at::DimVector sizes(input_.sizes().begin(), input_.sizes().begin() + counted_);
    sizes.push_back(grad.size(-1));
    return allocate(sizes, grad);
  }
  // Adds up what several samples have in common.
  void finish(const at::Tensor& memory, const at::Tensor& grad) const {
    if (!grad.defined() || memory.is_same(grad)) return;
    grad.copy_(memory.sum(broadcast_dims(grad)).view(grad.sizes()));
  }

 private:
  // Of [samples, columns] the other dimensions are left out.
  int64_t own(const at::Tensor& tensor, int64_t dim) const {
    return tensor.dim() == input_.dim() ? dim : dim == 0 ? 0 : -1;
  }
  int64_t size_of(const at::Tensor& tensor, int64_t dim) const {
    const int64_t at = own(tensor, dim);
    return at < 0 ? 1 : tensor.size(at);
  }
  at::DimVector broadcast_dims(const at::Tensor& tensor) const {
    at::DimVector dims;
    for (int64_t dim = 0; dim < counted_; ++dim) {
      if (size_of(tensor, dim) != input_.size(dim)) dims.push_back(dim);
    }
    return dims;
  }

  const at::Tensor& input_;
  int64_t counted_ = 0;  // the leading dimensions that count samples
};

// The tensors of a call, as its kernels take them.
struct Operands {
  Samples samples;
  TensorRows input, update, gate, scale, shift;
  at::Tensor weight, bias;

  explicit Operands(const AdaptiveNormOfRows& args)
      : samples(args),
        input(args.input, args.input.dim() - 1),
        update(args.update, args.input.dim() - 1),
        gate(samples.rows_of(args.gate)),
        scale(samples.rows_of(args.scale)),
        shift(samples.rows_of(args.shift)),
        weight(dense(args.weight)),
        bias(dense(args.bias)) {
  }

  AdaptiveNormCall call(const AdaptiveNormOfRows& args) const {
    const int64_t columns = args.input.size(-1), rows = args.input.numel() / columns;
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    TORCH_CHECK_VALUE(rows < kMost && columns < kMost, args.op,
                      ": no more than 2^31 rows, or numbers in a row; got ", rows, " of ", columns);
    AdaptiveNormCall call{};
    call.input = input.get();
    call.update = update.get();
    call.gate = gate.get();
    call.scale = scale.get();
    call.shift = shift.get();
    call.weight = data_of(weight);
    call.bias = data_of(bias);
    call.rows = static_cast<unsigned>(rows);
    call.columns = static_cast<unsigned>(columns);
    call.tokens = static_cast<unsigned>(rows / samples.count());
    call.eps = static_cast<float>(args.eps);
    call.is_layer = args.is_layer;
    call.is_gate_float = is_float(args.gate);
    call.is_scale_float = is_float(args.scale);
    call.is_shift_float = is_float(args.shift);
    call.is_weight_float = is_float(weight);
    call.is_bias_float = is_float(bias);
    return call;
  }

  // `more`: the bits that are set in other addresses.
  AdaptiveNormProblem problem(const AdaptiveNormCall& call, const at::Tensor& like,
                              uint64_t more) const {
    const auto number_bytes = static_cast<unsigned>(like.element_size());
    uint64_t bits = more | static_cast<uint64_t>(call.columns) * number_bytes;
    for (const auto* rows : {&input, &update, &gate, &scale, &shift}) bits |= rows->address_bits();
    bits |= reinterpret_cast<uintptr_t>(call.weight) | reinterpret_cast<uintptr_t>(call.bias);
    return {{call.rows, call.columns, number_bytes, bits % 16 == 0 ? 16 : number_bytes},
            call.tokens,
            call.update.data != nullptr,
            call.grad_weight != nullptr || call.grad_bias != nullptr};
  }
};

// The forward reads scale and shift as numbers of one type.
AdaptiveNormOfRows of_one_type(const AdaptiveNormOfRows& args) {
  AdaptiveNormOfRows same = args;
  if (args.scale.defined() && args.shift.defined() &&
      is_float(args.scale) != is_float(args.shift)) {
    same.scale = args.scale.to(at::kFloat);
    same.shift = args.shift.to(at::kFloat);
  }
  return same;
}

// As the kernels for them take them for granted.
bool has_usual_operands(const AdaptiveNormCall& call, bool is_float) {
  return call.scale.data != nullptr && call.shift.data != nullptr &&
         call.is_scale_float == is_float && call.is_shift_float == is_float &&
         call.weight == nullptr && call.bias == nullptr;
}

// The sums of the backward's rows, where they are wanted: memory for the parts, and their total.
class Sums {
 public:
  Sums(AdaptiveNormCall& call, const AdaptiveNormShares& shares, bool is_gated,
       const at::Tensor& like)
      : kinds_(is_gated ? 3 : 2) {
    call.stretch = static_cast<unsigned>(shares.stretch);
    call.workers = static_cast<unsigned>(shares.workers);
    const bool has_samples =
        call.grad_gate != nullptr || call.grad_scale != nullptr || call.grad_shift != nullptr;
    has_parameters_ = call.grad_weight != nullptr || call.grad_bias != nullptr;
    has_parts_ = has_samples && shares.has_parts;
    const int64_t columns = call.columns;
    const int64_t parts = has_parts_ ? 2 * kinds_ * shares.workers * columns : 0;
    const int64_t parameters = has_parameters_ ? 2 * shares.workers * columns : 0;
    if (parts + parameters == 0) return;
    memory_ = allocate({parts + parameters}, like);
    auto* data = data_of<float>(memory_);
    call.partial = has_parts_ ? data : nullptr;
    call.parameter = has_parameters_ ? data + parts : nullptr;
  }

  void add_up(AdaptiveNormCall& call, const AdaptiveNormProblem& problem,
              const DeviceKernel& kernel) const {
    if (!memory_.defined()) return;
    constexpr int64_t kStrip = 32;
    const auto totals = adaptive_norm_totals(problem, call.stretch);
    call.split = static_cast<unsigned>(totals.split);
    const int64_t samples = has_parts_ ? totals.strips * (call.rows / call.tokens) : 0;
    const int64_t parameters = has_parameters_ ? 2 * divide_up(call.columns, kStrip) : 0;
    void* argument = &call;
    kernel.launch(samples + parameters, 1, kAdaptiveNormTotalsThreads, &argument);
  }

 private:
  int64_t kinds_;
  bool has_parameters_ = false, has_parts_ = false;
  at::Tensor memory_;
};

// By kernels that have each row in shared memory, or where it is a sample of its own in registers.
void backward_of_tile(AdaptiveNormCall& call, const AdaptiveNormProblem& problem,
                      const AdaptiveNormBackwardLaunch& launch, const BackwardKernels& kernels,
                      const at::Tensor& like) {
  const int gated = problem.is_gated ? 1 : 0;
  const bool is_odd = problem.piece_bytes != 16;
  const unsigned vectors = launch.how.vectors;
  const auto threads = static_cast<int>(launch.how.threads);
  const auto shared = static_cast<int>(launch.shared_bytes);
  const int64_t of_block = launch.how.threads / launch.how.group;
  void* argument = &call;
  call.group = launch.how.group;
  call.row_bytes = launch.row_bytes;
  if (launch.is_single) {
    const auto& kernel = kernels.single[gated][is_odd ? 3 : vectors / 2];
    kernel.launch(divide_up(problem.rows, of_block), 1, threads, &argument, shared);
    return;
  }
  if (launch.blocks.workers > 0) {
    const Sums sums(call, launch.blocks, problem.is_gated, like);
    kernels.blocks[gated].launch(launch.blocks.workers, 1, threads, &argument, shared);
    return;
  }
  const auto& kernel = is_odd             ? kernels.odd[gated][vectors / 32]
                       : problem.is_gated ? kernels.gated_wide[vectors - 1]
                                          : kernels.wide[vectors - 1];
  const int64_t workers = is_odd ? 1 : of_block;  // of a block
  const auto shares =
      adaptive_norm_shares(problem, kernel.resident_blocks(threads, shared) * workers);
  const Sums sums(call, shares, problem.is_gated, like);
  kernel.launch(divide_up(shares.workers, workers), 1, threads, &argument, shared);
  sums.add_up(call, problem, kernels.totals[gated]);
}

// By kernels that read the rows twice, and for the sums once more.
void backward_of_any(AdaptiveNormCall& call, const AdaptiveNormProblem& problem,
                     const BackwardKernels& kernels, const at::Tensor& like) {
  constexpr int kThreads = 512;
  constexpr int64_t kBlocks = 512, kStrip = 32;
  const bool is_wide = problem.piece_bytes == 16, is_gated = problem.is_gated;
  const int64_t pieces = problem.columns * problem.number_bytes / problem.piece_bytes;
  const int64_t strips = divide_up(pieces, kStrip);
  const auto shares = adaptive_norm_shares(problem, divide_up(kBlocks, strips));
  const Sums sums(call, shares, is_gated, like);
  at::Tensor slopes;
  if (call.grad_gate != nullptr) slopes = allocate({2 * problem.rows}, like);
  call.slopes = data_of<float>(slopes);
  void* argument = &call;
  if (call.out != nullptr || call.grad_update != nullptr || call.slopes != nullptr) {
    kernels.rows[is_wide ? 0 : 1].launch(problem.rows, 1, kThreads, &argument);
  }
  const bool has_sums = call.grad_gate != nullptr || call.grad_scale != nullptr ||
                        call.grad_shift != nullptr || call.parameter != nullptr;
  if (!has_sums) return;
  kernels.sums[is_gated ? 1 : 0][is_wide ? 0 : 1].launch(strips * shares.workers, 1, kThreads,
                                                         &argument);
  sums.add_up(call, problem, kernels.totals[is_gated ? 1 : 0]);
}

}  // namespace

void adaptive_norm_forward(const AdaptiveNormOfRows& given, const at::Tensor& out,
                           const at::Tensor& sum, const at::Tensor& mean, const at::Tensor& rstd) {
  const AdaptiveNormOfRows args = of_one_type(given);
  const Operands operands(args);
  AdaptiveNormCall call = operands.call(args);
  // Where there is no scale, the shift says of which type both are.
  if (!args.scale.defined()) call.is_scale_float = call.is_shift_float;
  call.out = data_of(out);
  call.sum = data_of(sum);
  call.mean = data_of<float>(mean);
  call.rstd = data_of<float>(rstd);
  const AdaptiveNormProblem problem = operands.problem(call, args.input, 0);
  const bool is_usual = has_usual_operands(call, is_float(args.input));
  const AdaptiveNormForwardLaunch launch = adaptive_norm_forward_launch(problem, is_usual);
  call.group = launch.how.group;
  call.row_bytes = launch.row_bytes;
  const auto& kernels = forward_kernels(type_index(args.input.scalar_type()));
  const bool is_wide = problem.piece_bytes == 16;
  const unsigned vectors = launch.how.vectors;
  const DeviceKernel* wide = !is_usual          ? kernels.wide.any
                             : problem.is_gated ? kernels.wide.gated
                                                : kernels.wide.usual;
  constexpr unsigned kWarp = 32;
  const auto& narrow = !is_usual || vectors != 8 || call.group < kWarp ? kernels.narrow[vectors / 8]
                       : problem.is_gated                              ? kernels.gated
                                                                       : kernels.usual;
  const auto& ahead = problem.is_gated ? kernels.wide.gated_ahead : kernels.wide.ahead;
  const auto& kernel = vectors == 0      ? kernels.any[is_wide ? 0 : 1]
                       : launch.is_ahead ? ahead[vectors - 4]
                       : is_wide         ? wide[index_of(vectors)]
                                         : narrow;
  void* argument = &call;
  kernel.launch(launch.blocks, 1, launch.threads, &argument, static_cast<int>(launch.shared_bytes));
}

void adaptive_norm_backward(const AdaptiveNormOfRows& given, const at::Tensor& grad_out,
                            const at::Tensor& grad_sum, const at::Tensor& mean,
                            const at::Tensor& rstd, const AdaptiveNormGradientsOut& grads) {
  AdaptiveNormOfRows args = given;
  const bool is_gated = grads.update.defined() || grads.gate.defined();
  if (!is_gated) args.update = at::Tensor();  // and the kernel is the one that reads none
  const Operands operands(args);
  const TensorRows of_out(grad_out, args.input.dim() - 1), more(grad_sum, args.input.dim() - 1);
  const auto& samples = operands.samples;
  const at::Tensor gate = samples.memory_for(grads.gate), scale = samples.memory_for(grads.scale),
                   shift = samples.memory_for(grads.shift);
  AdaptiveNormCall call = operands.call(args);
  call.grad_out = of_out.get();
  call.grad_sum = more.get();
  call.mean = data_of<float>(mean);
  call.rstd = data_of<float>(rstd);
  call.out = data_of(grads.input);
  call.grad_update = data_of(grads.update);
  call.grad_gate = data_of(gate);
  call.grad_scale = data_of(scale);
  call.grad_shift = data_of(shift);
  call.grad_weight = data_of(grads.weight);
  call.grad_bias = data_of(grads.bias);
  call.is_grad_gate_float = is_float(gate);
  call.is_grad_scale_float = is_float(scale);
  call.is_grad_shift_float = is_float(shift);
  const AdaptiveNormProblem problem =
      operands.problem(call, args.input, of_out.address_bits() | more.address_bits());
  const auto& kernels = backward_kernels(type_index(args.input.scalar_type()));
  const auto launch = adaptive_norm_backward_launch(problem, current_limits());
  if (launch.how.vectors == 0) {
    backward_of_any(call, problem, kernels, args.input);
  } else {
    backward_of_tile(call, problem, launch, kernels, args.input);
  }
  samples.finish(gate, grads.gate);
  samples.finish(scale, grads.scale);
  samples.finish(shift, grads.shift);
}

}  // namespace cudnn_ops
