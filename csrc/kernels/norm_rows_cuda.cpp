#include "norm_rows.h"

#include "norm_backward_bfloat16_images.h"
#include "norm_backward_float_images.h"
#include "norm_backward_half_images.h"
#include "norm_forward_bfloat16_images.h"
#include "norm_forward_float_images.h"
#include "norm_forward_half_images.h"
#include "norm_rows_call.h"
#include "../ops/norm_problem.h"
#include "device_kernel.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/EmptyTensor.h>

#include <algorithm>
#include <array>

namespace cudnn_ops {
namespace {

constexpr unsigned kWarp = 32;

unsigned divide_up(unsigned number, unsigned by) {
  return (number + by - 1) / by;
}

// The rows of a tensor, seen as they lie or copied where three strides do not say where they are.
class Rows {
 public:
  // Rows that are none where the tensor is not defined.
  Rows(const at::Tensor& tensor, int64_t row_dims) : tensor_(tensor) {
    if (!tensor_.defined()) return;
    if (!tensor_.is_contiguous() && !see(row_dims)) tensor_ = tensor_.contiguous();
    if (tensor_.is_contiguous()) {
      int64_t columns = 1;
      for (int64_t dim = row_dims; dim < tensor_.dim(); ++dim) columns *= tensor_.size(dim);
      rows_ = {nullptr, columns, 0, 0, 0, 0};
    }
    rows_.data = tensor_.const_data_ptr();
  }

  const NormRows& get() const {
    return rows_;
  }
  // The bits that are set in the address of some row.
  uint64_t address_bits() const {
    const int64_t strides = rows_.stride | rows_.middle_stride | rows_.inner_stride;
    const int64_t bytes = tensor_.defined() ? static_cast<int64_t>(tensor_.element_size()) : 0;
    return reinterpret_cast<uintptr_t>(rows_.data) | static_cast<uint64_t>(strides * bytes);
  }

 private:
  bool see(int64_t row_dims) {
    const auto sizes = tensor_.sizes(), strides = tensor_.strides();
    int64_t expected = 1;
    for (int64_t dim = tensor_.dim() - 1; dim >= row_dims; --dim) {
      if (sizes[dim] != 1 && strides[dim] != expected) return false;
      expected *= sizes[dim];
    }
    // From the innermost outwards, dimensions that go on where the last ends taken together.
    std::array<int64_t, 3> size{1, 1, 1}, stride{0, 0, 0};
    size_t levels = 0;
    for (int64_t dim = row_dims - 1; dim >= 0; --dim) {
      if (sizes[dim] == 1) continue;
      if (levels > 0 && strides[dim] == size[levels - 1] * stride[levels - 1]) {
        size[levels - 1] *= sizes[dim];
      } else {
        if (levels == size.size()) return false;
        size[levels] = sizes[dim];
        stride[levels++] = strides[dim];
      }
    }
    if (levels <= 1) {
      rows_ = {nullptr, stride[0], 0, 0, 0, 0};
    } else {
      rows_ = {nullptr,
               stride[2],
               stride[1],
               stride[0],
               static_cast<unsigned>(size[1]),
               static_cast<unsigned>(size[0])};
    }
    return true;
  }

  at::Tensor tensor_;
  NormRows rows_{};
};

template <class T = void>
T* data_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
}

at::Tensor dense(const OptionalTensor& parameter) {
  return parameter ? parameter->contiguous() : at::Tensor();
}

// Of a row that is copied whole, with what lies beside it in the same 16 bytes.
unsigned whole_row_bytes(const NormCall& call, unsigned number_bytes) {
  constexpr unsigned kCopied = 16;
  return (divide_up(call.columns * number_bytes, kCopied) + 1) * kCopied;
}

// What both directions have in common.
NormCall call_of(const Norm& args, const Rows& input, const at::Tensor& weight) {
  NormCall call{};
  const int64_t columns = row_size(args.normalized_shape);
  const int64_t rows = args.input.numel() / columns;
  TORCH_CHECK_VALUE(rows < INT32_MAX && columns < INT32_MAX, name_of(args),
                    ": no more than 2^31 rows, or numbers in a row; got ", rows, " of ", columns);
  call.input = input.get();
  call.weight = data_of(weight);
  call.rows = static_cast<unsigned>(rows);
  call.columns = static_cast<unsigned>(columns);
  call.row_bytes = whole_row_bytes(call, static_cast<unsigned>(args.input.element_size()));
  call.eps = static_cast<float>(args.eps);
  call.is_layer = args.is_layer;
  call.zero_centered = args.zero_centered;
  call.is_weight_float = weight.defined() && weight.scalar_type() == at::kFloat;
  return call;
}

// The bytes that a thread can load at once: 16, 8 or one number's.
unsigned piece_bytes(const NormCall& call, unsigned number_bytes, uint64_t row_bits) {
  const auto parameter_bits =
      reinterpret_cast<uintptr_t>(call.weight) | reinterpret_cast<uintptr_t>(call.bias);
  const uint64_t bits = row_bits | static_cast<uint64_t>(call.columns) * number_bytes;
  if (bits % 16 == 0 && parameter_bits % 16 == 0) return 16;
  return bits % 8 == 0 && parameter_bits % 16 == 0 ? 8 : number_bytes;
}

// How a row is spread over threads, and rows over a block: `vectors` pieces a thread; 0: a row is
// too long for that.
struct Spread {
  unsigned bytes, vectors, group, threads;
};

constexpr Spread kAnyRows{0, 0, 0, 0};

Spread within_warp(unsigned bytes, unsigned vectors, unsigned pieces) {
  unsigned group = 1;
  while (group * vectors < pieces) group *= 2;
  return {bytes, vectors, group, 256};
}

Spread within_block(unsigned bytes, unsigned vectors, unsigned pieces) {
  const unsigned group = divide_up(divide_up(pieces, vectors), kWarp) * kWarp;
  return {bytes, vectors, group, group};
}

// Of pieces of fewer than 16 bytes.
Spread spread_small(unsigned bytes, unsigned pieces, unsigned most_threads) {
  const unsigned few = bytes == 8 ? 1 : 2, most = bytes == 8 ? 4 : 8;
  if (pieces <= few * kWarp) return within_warp(bytes, few, pieces);
  if (pieces <= most * kWarp) return within_warp(bytes, most, pieces);
  return pieces <= most * most_threads ? within_block(bytes, most, pieces) : kAnyRows;
}

// As many pieces a thread as still leave threads enough: the sums over threads are a good part of
// the instructions, which limit the forward. Few rows wait for memory: more threads each.
Spread spread_forward(unsigned bytes, unsigned pieces, unsigned rows) {
  if (bytes < 16) return spread_small(bytes, pieces, /*most_threads=*/1024);
  if (pieces <= 4 * kWarp) return within_warp(bytes, pieces <= 8 ? 2 : 4, pieces);
  constexpr unsigned kMost = 512, kFewRows = 512;
  if (rows <= kFewRows && pieces <= 4 * kMost) return within_block(bytes, 2, pieces);
  if (pieces <= 4 * kMost) return within_block(bytes, 4, pieces);
  return pieces <= 8 * kMost ? within_block(bytes, 8, pieces) : kAnyRows;
}

// Few pieces a thread as long as a warp or a block has them all, for more loads under way.
Spread spread_backward(unsigned bytes, unsigned pieces) {
  constexpr unsigned kMost = 512;
  if (bytes < 16) return spread_small(bytes, pieces, kMost);
  if (pieces <= kWarp) return within_warp(bytes, 1, pieces);
  if (pieces <= 2 * kWarp) return within_warp(bytes, 2, pieces);
  if (pieces <= 2 * kMost) return within_block(bytes, 2, pieces);
  if (pieces <= 4 * kMost) return within_block(bytes, 4, pieces);
  return pieces <= 8 * kMost ? within_block(bytes, 8, pieces) : kAnyRows;
}

// The kernels that keep a row in registers: by type, kind, and the index of their spread, which not
// every direction uses.
constexpr int kSpreads = 8;

int index_of(const Spread& how) {
  if (how.bytes == 16)
    return how.vectors == 1 ? 0 : how.vectors == 2 ? 1 : how.vectors == 4 ? 2 : 7;
  return (how.bytes == 8 ? 3 : 5) + (how.vectors <= 2 ? 0 : 1);
}

using Kernels = DeviceKernel[2][kSpreads];

#define CUDNN_OPS_KIND(images, name)                                                           \
  {                                                                                            \
    {images, name "_16_1", true}, {images, name "_16_2", true}, {images, name "_16_4", true},  \
        {images, name "_8_1", true}, {images, name "_8_4", true}, {images, name "_n_2", true}, \
        {images, name "_n_8", true}, {                                                         \
      images, name "_16_8", true                                                               \
    }                                                                                          \
  }
#define CUDNN_OPS_KINDS(images, direction) \
  {CUDNN_OPS_KIND(images, "rms_norm_" direction), CUDNN_OPS_KIND(images, "layer_norm_" direction)}
#define CUDNN_OPS_TYPES(direction, name)                    \
  {CUDNN_OPS_KINDS(kNorm##direction##HalfImages, name),     \
   CUDNN_OPS_KINDS(kNorm##direction##BFloat16Images, name), \
   CUDNN_OPS_KINDS(kNorm##direction##FloatImages, name)}
#define CUDNN_OPS_ANY(direction, name)                                                            \
  {                                                                                               \
    {kNorm##direction##HalfImages, name, true}, {kNorm##direction##BFloat16Images, name, true}, { \
      kNorm##direction##FloatImages, name, true                                                   \
    }                                                                                             \
  }

void launch_forward(NormCall& call, int type, unsigned number_bytes, uint64_t row_bits) {
  static const Kernels kernels[3] = CUDNN_OPS_TYPES(Forward, "forward");
  static const DeviceKernel any[2][3] = {CUDNN_OPS_ANY(Forward, "norm_forward_any_n"),
                                         CUDNN_OPS_ANY(Forward, "norm_forward_any_16")};
  const unsigned bytes = piece_bytes(call, number_bytes, row_bits);
  const Spread how = spread_forward(bytes, call.columns * number_bytes / bytes, call.rows);
  void* argument = &call;
  if (how.vectors == 0) return any[bytes == 16][type].launch(call.rows, 1, 1024, &argument);
  call.group = how.group;
  kernels[type][call.is_layer][index_of(how)].launch(divide_up(call.rows, how.threads / how.group),
                                                     1, static_cast<int>(how.threads), &argument);
}

// Of the backward's pipeline through shared memory, as in norm_backward.cu.
constexpr unsigned kStages = 3;
constexpr unsigned kMaxShared = 220 << 10;

// The shared memory of a block's rows of one tensor; those of pieces that cp.async cannot take are
// copied whole.
unsigned stage_bytes(const NormCall& call, const Spread& how) {
  const bool is_whole = how.vectors > 0 && how.bytes < 4;
  return is_whole ? call.row_bytes * (how.threads / how.group)
                  : how.vectors * how.bytes * how.threads;
}

// The rows of sums that the backward leaves.
at::Tensor allocate_partials(NormCall& call, int64_t count, const at::Device& device) {
  const int64_t numbers = (call.is_layer ? 2 : 1) * count * static_cast<int64_t>(call.columns);
  at::Tensor memory = at::detail::empty_cuda({numbers}, at::kFloat, device, std::nullopt);
  call.partials = static_cast<unsigned>(count);
  call.partial = static_cast<float*>(memory.mutable_data_ptr());
  return memory;
}

void launch_backward(NormCall& call, int type, unsigned number_bytes, uint64_t row_bits,
                     const at::Device& device) {
  static const Kernels kernels[3] = CUDNN_OPS_TYPES(Backward, "backward");
  static const DeviceKernel any[2][3] = {CUDNN_OPS_ANY(Backward, "norm_backward_any_n"),
                                         CUDNN_OPS_ANY(Backward, "norm_backward_any_16")};
  static const DeviceKernel few[2][3] = {CUDNN_OPS_ANY(Backward, "norm_backward_few_n"),
                                         CUDNN_OPS_ANY(Backward, "norm_backward_few_16")};
  static const DeviceKernel partial[2][3] = {CUDNN_OPS_ANY(Backward, "norm_partial_n"),
                                             CUDNN_OPS_ANY(Backward, "norm_partial_16")};
  static const DeviceKernel columns[3] = CUDNN_OPS_ANY(Backward, "norm_columns");
  const bool needs_columns = call.grad_weight != nullptr || call.grad_bias != nullptr;
  const unsigned bytes = piece_bytes(call, number_bytes, row_bits);
  Spread how = spread_backward(bytes, call.columns * number_bytes / bytes);
  const bool is_wide = how.vectors == 8 && how.bytes == 16;  // nothing left for the sums
  const unsigned numbers = how.vectors * how.threads * (how.bytes / number_bytes);
  const auto sums_bytes = numbers * static_cast<unsigned>(sizeof(float));
  const unsigned shared =
      std::max((is_wide ? 1 : kStages) * 2 * stage_bytes(call, how), is_wide ? 0 : sums_bytes);
  if (shared > kMaxShared) how = kAnyRows;
  at::Tensor partials;
  void* argument = &call;
  call.group = how.group;
  // Of few rows one kernel does it all; the longer they are, the more of them.
  const unsigned few_rows = std::max(256U, call.columns * number_bytes / 32);
  const bool is_block = how.group > kWarp || how.vectors == 0;
  if (needs_columns && call.out != nullptr && call.rows <= few_rows && is_block) {
    const unsigned strips = divide_up(call.columns, kWarp * (bytes == 16 ? 4 / number_bytes : 1));
    return few[bytes == 16][type].launch(strips + call.rows, 1, 512, &argument);
  }
  if (how.vectors > 0 && !is_wide) {
    const auto& kernel = kernels[type][call.is_layer][index_of(how)];
    const auto threads = static_cast<int>(how.threads);
    // A few rows a block: for less, their sums would take longer to add up than they.
    constexpr unsigned kRows = 4;
    const unsigned turns = divide_up(call.rows, how.threads / how.group);
    const auto processors =
        static_cast<unsigned>(at::cuda::getDeviceProperties(device.index())->multiProcessorCount);
    const int64_t blocks =
        std::min<int64_t>({turns, std::max(processors, divide_up(turns, kRows)),
                           kernel.resident_blocks(threads, static_cast<int>(shared))});
    if (needs_columns) partials = allocate_partials(call, blocks, device);
    kernel.launch(blocks, 1, threads, &argument, static_cast<int>(shared));
    if (blocks == 1) return;  // it wrote the sums
  } else {
    if (call.out != nullptr && is_wide) {
      const auto& kernel = kernels[type][call.is_layer][index_of(how)];
      const auto threads = static_cast<int>(how.threads);
      const int64_t resident = kernel.resident_blocks(threads, static_cast<int>(shared));
      kernel.launch(std::min<int64_t>(call.rows, resident), 1, threads, &argument,
                    static_cast<int>(shared));
    } else if (call.out != nullptr) {
      any[bytes == 16][type].launch(call.rows, 1, bytes == 16 ? 1024 : 512, &argument);
    }
    if (needs_columns) {
      constexpr int64_t kBlocks = 512, kRows = 16;
      const int64_t strips =
          divide_up(call.columns * number_bytes / (bytes == 16 ? 16 : number_bytes), kWarp);
      const int64_t stretches =
          std::min<int64_t>(divide_up(call.rows, kRows), (kBlocks + strips - 1) / strips);
      partials = allocate_partials(call, stretches, device);
      partial[bytes == 16][type].launch(strips, static_cast<int>(stretches), 512, &argument);
    }
  }
  if (needs_columns) {
    columns[type].launch(divide_up(call.columns, kWarp), call.is_layer ? 2 : 1, 1024, &argument);
  }
}

}  // namespace

void norm_rows(const Norm& args, const at::Tensor& out, const at::Tensor& sum,
               const at::Tensor& mean, const at::Tensor& rstd) {
  const auto row_dims = args.input.dim() - static_cast<int64_t>(args.normalized_shape.size());
  const Rows input(args.input, row_dims);
  const Rows residual(args.residual ? *args.residual : at::Tensor(), row_dims);
  at::Tensor weight = dense(args.weight), bias = dense(args.bias);
  const auto is_float = [](const at::Tensor& parameter) {
    return parameter.defined() && parameter.scalar_type() == at::kFloat;
  };
  // The kernels take both of one type.
  if (is_float(weight) && bias.defined()) bias = bias.to(at::kFloat);
  if (is_float(bias) && weight.defined()) weight = weight.to(at::kFloat);
  NormCall call = call_of(args, input, weight);
  call.is_weight_float = call.is_bias_float = is_float(weight) || is_float(bias);
  call.residual = residual.get();
  call.bias = data_of(bias);
  call.out = data_of(out);
  call.sum = data_of(sum);
  call.mean = data_of<float>(mean);
  call.rstd = data_of<float>(rstd);
  launch_forward(call, type_index(args.input.scalar_type()),
                 static_cast<unsigned>(args.input.element_size()),
                 input.address_bits() | residual.address_bits());
}

void norm_rows_backward(const Norm& args, const at::Tensor& grad_out, const at::Tensor& grad_sum,
                        const at::Tensor& mean, const at::Tensor& rstd,
                        const at::Tensor& grad_input, const at::Tensor& grad_weight,
                        const at::Tensor& grad_bias) {
  const auto row_dims = args.input.dim() - static_cast<int64_t>(args.normalized_shape.size());
  const Rows input(args.input, row_dims), grads(grad_out, row_dims), more(grad_sum, row_dims);
  const at::Tensor weight = dense(args.weight);
  NormCall call = call_of(args, input, weight);
  call.grad_out = grads.get();
  call.grad_sum = more.get();
  call.mean = data_of<float>(mean);
  call.rstd = data_of<float>(rstd);
  call.out = data_of(grad_input);
  call.grad_weight = data_of(grad_weight);
  call.grad_bias = data_of(grad_bias);
  call.is_bias_float = grad_bias.defined() && grad_bias.scalar_type() == at::kFloat;
  launch_backward(
      call, type_index(args.input.scalar_type()), static_cast<unsigned>(args.input.element_size()),
      input.address_bits() | grads.address_bits() | more.address_bits(), args.input.device());
}

}  // namespace cudnn_ops
