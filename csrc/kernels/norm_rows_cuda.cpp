#include "norm_rows.h"

#include "norm_backward_bfloat16_ptx.h"
#include "norm_backward_float_ptx.h"
#include "norm_backward_half_ptx.h"
#include "norm_forward_bfloat16_ptx.h"
#include "norm_forward_float_ptx.h"
#include "norm_forward_half_ptx.h"
#include "norm_rows_call.h"
#include "ptx_kernel.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/EmptyTensor.h>

#include <algorithm>
#include <array>

namespace cudnn_ops {
namespace {

constexpr unsigned kWarp = 32;
constexpr int64_t kVectorBytes = 16;

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
  bool is_aligned() const {
    const int64_t mask = rows_.stride | rows_.middle_stride | rows_.inner_stride;
    return reinterpret_cast<uintptr_t>(rows_.data) % kVectorBytes == 0 &&
           (!tensor_.defined() ||
            mask * static_cast<int64_t>(tensor_.element_size()) % kVectorBytes == 0);
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

bool is_aligned(const at::Tensor& tensor) {
  return !tensor.defined() ||
         reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kVectorBytes == 0;
}

template <class T = void>
T* data_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
}

at::Tensor dense(const OptionalTensor& parameter) {
  return parameter ? parameter->contiguous() : at::Tensor();
}

int type_index(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return dtype == at::kHalf ? 0 : dtype == at::kBFloat16 ? 1 : 2;
}

// What both directions have in common.
NormCall call_of(const Norm& args, const Rows& input, const at::Tensor& weight) {
  NormCall call{};
  int64_t columns = 1;
  for (const auto& size : args.normalized_shape) columns *= size.expect_int();
  const int64_t rows = args.input.numel() / columns;
  TORCH_CHECK_VALUE(rows < INT32_MAX && columns < INT32_MAX, name_of(args),
                    ": no more than 2^31 rows, or numbers in a row; got ", rows, " of ", columns);
  call.input = input.get();
  call.weight = data_of(weight);
  call.rows = static_cast<unsigned>(rows);
  call.columns = static_cast<unsigned>(columns);
  call.eps = static_cast<float>(args.eps);
  call.is_layer = args.is_layer;
  call.zero_centered = args.zero_centered;
  call.is_weight_float = weight.defined() && weight.scalar_type() == at::kFloat;
  call.is_bias_float = args.bias && args.bias->scalar_type() == at::kFloat;
  return call;
}

// How a row is spread over threads, and rows over a block. `vectors` 0: not in registers.
struct Spread {
  unsigned vectors, group, threads;
};

// So few vectors a thread as a warp allows, and then two: enough loads under way at once.
Spread spread(unsigned vectors, unsigned max_group, unsigned max_vectors) {
  constexpr unsigned kThreads = 256;
  if (vectors <= kWarp) {
    unsigned group = 1;
    while (group < vectors) group *= 2;
    return {1, group, kThreads};
  }
  if (vectors <= 2 * kWarp) return {2, kWarp, kThreads};
  for (unsigned each = 2; each <= max_vectors; each *= 2) {
    const unsigned group = divide_up(divide_up(vectors, each), kWarp) * kWarp;
    if (group <= (each == 2 ? 512 : max_group)) return {each, group, group};
  }
  return {0, 512, 512};
}

constexpr std::array<const char*, 3> kForward{kNormForwardHalfPtx, kNormForwardBFloat16Ptx,
                                              kNormForwardFloatPtx};
constexpr std::array<const char*, 3> kBackward{kNormBackwardHalfPtx, kNormBackwardBFloat16Ptx,
                                               kNormBackwardFloatPtx};

// The kernels by type and by the index of their number of vectors: none, 1, 2, 4, 8.
int index_of(unsigned vectors) {
  return vectors == 0 ? 0 : vectors == 1 ? 1 : vectors == 2 ? 2 : vectors == 4 ? 3 : 4;
}

void launch_forward(NormCall& call, int type, bool is_aligned) {
#define CUDNN_OPS_NORM(ptx)                                                               \
  {                                                                                       \
    {ptx, "norm_any"}, {ptx, "norm_1"}, {ptx, "norm_2"}, {ptx, "norm_4"}, {ptx, "norm_8"} \
  }
  static const PtxKernel kernels[3][5] = {CUDNN_OPS_NORM(kForward[0]), CUDNN_OPS_NORM(kForward[1]),
                                          CUDNN_OPS_NORM(kForward[2])};
#undef CUDNN_OPS_NORM
  const unsigned width = type == 2 ? 4 : 8;
  const Spread how = is_aligned ? spread(call.columns / width, 1024, 8) : Spread{0, 512, 512};
  call.group = how.group;
  void* argument = &call;
  kernels[type][index_of(how.vectors)].launch(divide_up(call.rows, how.threads / how.group), 1,
                                              static_cast<int>(how.threads), &argument);
}

// How many rows of sums the backward leaves.
struct Partials {
  at::Tensor memory;
  void allocate(NormCall& call, unsigned count, const at::Device& device) {
    memory = at::detail::empty_cuda({(call.is_layer ? 2L : 1L) * count * call.columns}, at::kFloat,
                                    device, std::nullopt);
    call.partials = count;
    call.partial = static_cast<float*>(memory.mutable_data_ptr());
  }
};

void launch_backward(NormCall& call, int type, bool is_aligned, const at::Device& device) {
#define CUDNN_OPS_NORM(ptx, kind)                                                     \
  {                                                                                   \
    {ptx, "norm_backward_any"}, {ptx, kind "_backward_1"}, {ptx, kind "_backward_2"}, \
        {ptx, kind "_backward_4"}                                                     \
  }
#define CUDNN_OPS_NORMS(ptx)                                           \
  {                                                                    \
    CUDNN_OPS_NORM(ptx, "rms_norm"), CUDNN_OPS_NORM(ptx, "layer_norm") \
  }
  static const PtxKernel kernels[3][2][4] = {
      CUDNN_OPS_NORMS(kBackward[0]), CUDNN_OPS_NORMS(kBackward[1]), CUDNN_OPS_NORMS(kBackward[2])};
#undef CUDNN_OPS_NORMS
#undef CUDNN_OPS_NORM
  static const PtxKernel partial_kernels[3] = {{kBackward[0], "norm_partial_any"},
                                               {kBackward[1], "norm_partial_any"},
                                               {kBackward[2], "norm_partial_any"}};
  static const PtxKernel column_kernels[3] = {{kBackward[0], "norm_columns"},
                                              {kBackward[1], "norm_columns"},
                                              {kBackward[2], "norm_columns"}};
  constexpr unsigned kStages = 3, kTensors = 2;  // of the pipeline
  constexpr unsigned kMaxShared = 220 << 10;
  const unsigned width = type == 2 ? 4 : 8;
  const auto processors =
      static_cast<unsigned>(at::cuda::getDeviceProperties(device.index())->multiProcessorCount);
  const bool needs_columns = call.grad_weight != nullptr || call.grad_bias != nullptr;
  Spread how = is_aligned ? spread(call.columns / width, 512, 4) : Spread{0, 512, 512};
  const unsigned shared = kStages * kTensors * how.vectors * how.threads * kVectorBytes;
  if (shared > kMaxShared) how = {0, 512, 512};
  const PtxKernel& kernel = kernels[type][call.is_layer][index_of(how.vectors)];
  Partials partials;
  void* argument = &call;
  if (how.vectors > 0) {
    call.group = how.group;
    const unsigned per_processor = std::max(1U, (how.vectors == 1 ? 1024 : 512) / how.threads);
    const unsigned blocks =
        std::min(divide_up(call.rows, how.threads / how.group), processors * per_processor);
    if (needs_columns) partials.allocate(call, blocks, device);
    kernel.launch(blocks, 1, static_cast<int>(how.threads), &argument, static_cast<int>(shared));
  } else {
    if (call.out != nullptr) kernel.launch(call.rows, 1, 512, &argument);
    const unsigned strips = divide_up(call.columns, kWarp);
    if (needs_columns) {
      const unsigned wanted = divide_up(4 * processors, strips);
      partials.allocate(call, std::min(divide_up(call.rows, 16), wanted), device);
      partial_kernels[type].launch(strips, static_cast<int>(call.partials), 512, &argument);
    }
  }
  if (needs_columns) {
    column_kernels[type].launch(divide_up(call.columns, kWarp), call.is_layer ? 2 : 1, 1024,
                                &argument);
  }
}

}  // namespace

void norm_rows(const Norm& args, const at::Tensor& out, const at::Tensor& sum,
               const at::Tensor& mean, const at::Tensor& rstd) {
  const auto row_dims = args.input.dim() - static_cast<int64_t>(args.normalized_shape.size());
  const Rows input(args.input, row_dims);
  const Rows residual(args.residual ? *args.residual : at::Tensor(), row_dims);
  const at::Tensor weight = dense(args.weight), bias = dense(args.bias);
  NormCall call = call_of(args, input, weight);
  call.residual = residual.get();
  call.bias = data_of(bias);
  call.out = data_of(out);
  call.sum = data_of(sum);
  call.mean = data_of<float>(mean);
  call.rstd = data_of<float>(rstd);
  const bool aligned = call.columns * args.input.element_size() % kVectorBytes == 0 &&
                       input.is_aligned() && residual.is_aligned() && is_aligned(weight) &&
                       is_aligned(bias);
  launch_forward(call, type_index(args.input), aligned);
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
  const bool aligned = call.columns * args.input.element_size() % kVectorBytes == 0 &&
                       input.is_aligned() && grads.is_aligned() && more.is_aligned() &&
                       is_aligned(weight);
  launch_backward(call, type_index(args.input), aligned, args.input.device());
}

}  // namespace cudnn_ops
