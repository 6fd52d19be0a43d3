#include "kernels/fp8.h"

#include "fp8_images.h"
#include "kernels/device_kernel.h"
#include "kernels/fp8_call.h"

#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

namespace cudnn_ops {
namespace {

constexpr int64_t kBytes = 16, kThreads = 256, kMaxNumbers = 7;

// A tensor as rows side by side in the order of a dense one of the same sizes, copied only where it
// cannot be seen as that.
class RowsInOrder {
 public:
  RowsInOrder(const at::Tensor& tensor, const at::Tensor& dense)
      : tensor_(tensor), width_(tensor.numel()), pitch_(width_) {
    if (see(dense)) return;
    tensor_ = at::empty_like(tensor, at::MemoryFormat::Preserve).copy_(tensor);
    width_ = pitch_ = tensor.numel();
  }

  const at::Tensor& tensor() const {
    return tensor_;
  }
  int64_t width() const {
    return width_;
  }
  int64_t pitch() const {
    return pitch_;
  }

 private:
  bool see(const at::Tensor& dense) {
    c10::SmallVector<int64_t, 8> dims;  // innermost first
    for (int64_t dim = 0; dim < tensor_.dim(); ++dim) {
      if (tensor_.size(dim) > 1) dims.push_back(dim);
    }
    std::sort(dims.begin(), dims.end(),
              [&](int64_t a, int64_t b) { return dense.stride(a) < dense.stride(b); });
    int64_t expected = 1;
    bool is_in_row = true;
    for (const int64_t dim : dims) {
      const int64_t stride = tensor_.stride(dim);
      if (stride != expected) {
        if (!is_in_row || dim == dims[0] || stride < expected) return false;
        is_in_row = false;
        width_ = expected;
        pitch_ = stride;
      }
      expected = stride * tensor_.size(dim);
    }
    return true;
  }

  at::Tensor tensor_;
  int64_t width_, pitch_;
};

bool is_aligned(const at::Tensor& tensor, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % bytes == 0;
}

// The numbers of a call in pieces as wide as memory allows; `wide` is the tensor of 16 bits or
// more.
struct Pieces {
  Fp8Call call{};
  RowsInOrder rows;
  bool is_wide;

  Pieces(const at::Tensor& input, std::optional<int64_t> dim, const at::Tensor& out,
         const at::Tensor& wide)
      : rows(input, out) {
    const int64_t groups = dim ? out.size(*dim) : 1;
    const int64_t inner = groups == 1 ? out.numel() : out.stride(*dim);
    const int64_t widest = kBytes / static_cast<int64_t>(wide.element_size());
    const auto fits = [&](const at::Tensor& tensor) {
      return is_aligned(tensor, widest * static_cast<int64_t>(tensor.element_size()));
    };
    is_wide = rows.width() % widest == 0 && rows.pitch() % widest == 0 && inner % widest == 0 &&
              fits(rows.tensor()) && fits(out);
    const int64_t width = is_wide ? widest : 1;
    call.input = rows.tensor().const_data_ptr();
    call.out = out.mutable_data_ptr();
    call.pieces = out.numel() / groups / width;
    call.inner = inner / width;
    call.width = rows.width() / width;
    call.pitch = rows.pitch() / width;
    call.groups = static_cast<unsigned>(groups);
  }

  // A thread for each piece, as long as that is no more than runs at the same time.
  void launch(const DeviceKernel& kernel) {
    constexpr int64_t kBlocksPerProcessor = 8;
    const int64_t resident = current_limits().processors * kBlocksPerProcessor;
    const int64_t blocks = std::min(divide_up(call.pieces, kThreads),
                                    divide_up(resident, static_cast<int64_t>(call.groups)));
    void* argument = &call;
    kernel.launch(blocks, static_cast<int>(call.groups), kThreads, &argument);
  }
};

const DeviceKernel& amax_kernel(at::ScalarType dtype, bool is_wide) {
  static const DeviceKernel kernels[3][2] = {
      {{kFp8Images, "fp8_amax_half_1"}, {kFp8Images, "fp8_amax_half_8"}},
      {{kFp8Images, "fp8_amax_bfloat16_1"}, {kFp8Images, "fp8_amax_bfloat16_8"}},
      {{kFp8Images, "fp8_amax_float_1"}, {kFp8Images, "fp8_amax_float_4"}}};
  return kernels[type_index(dtype)][is_wide];
}

// From a type to a format of 8 bits.
const DeviceKernel& cast_kernel(at::ScalarType dtype, at::ScalarType fp8, bool is_wide) {
#define CUDNN_OPS_FP8_CAST(name, fp8, width)         \
  {                                                  \
    {kFp8Images, "fp8_cast_" name "_" fp8 "_1"}, {   \
      kFp8Images, "fp8_cast_" name "_" fp8 "_" width \
    }                                                \
  }
#define CUDNN_OPS_FP8_CASTS(name, width)                                             \
  {                                                                                  \
    CUDNN_OPS_FP8_CAST(name, "e4m3", width), CUDNN_OPS_FP8_CAST(name, "e5m2", width) \
  }
  static const DeviceKernel kernels[3][2][2] = {CUDNN_OPS_FP8_CASTS("half", "8"),
                                                CUDNN_OPS_FP8_CASTS("bfloat16", "8"),
                                                CUDNN_OPS_FP8_CASTS("float", "4")};
#undef CUDNN_OPS_FP8_CASTS
#undef CUDNN_OPS_FP8_CAST
  return kernels[type_index(dtype)][fp8 == at::kFloat8_e5m2][is_wide];
}

// The way back.
const DeviceKernel& uncast_kernel(at::ScalarType fp8, at::ScalarType dtype, bool is_wide) {
#define CUDNN_OPS_FP8_UNCAST(name, fp8, width)         \
  {                                                    \
    {kFp8Images, "fp8_uncast_" fp8 "_" name "_1"}, {   \
      kFp8Images, "fp8_uncast_" fp8 "_" name "_" width \
    }                                                  \
  }
#define CUDNN_OPS_FP8_UNCASTS(name, width)                                               \
  {                                                                                      \
    CUDNN_OPS_FP8_UNCAST(name, "e4m3", width), CUDNN_OPS_FP8_UNCAST(name, "e5m2", width) \
  }
  static const DeviceKernel kernels[3][2][2] = {CUDNN_OPS_FP8_UNCASTS("half", "8"),
                                                CUDNN_OPS_FP8_UNCASTS("bfloat16", "8"),
                                                CUDNN_OPS_FP8_UNCASTS("float", "4")};
#undef CUDNN_OPS_FP8_UNCASTS
#undef CUDNN_OPS_FP8_UNCAST
  return kernels[type_index(dtype)][fp8 == at::kFloat8_e5m2][is_wide];
}

at::Tensor empty_numbers(int64_t count, at::ScalarType dtype, const at::Tensor& like) {
  return at::detail::empty_cuda({count}, dtype, like.device(), std::nullopt);
}

}  // namespace

void round_to_fp8(const at::Tensor& input, const std::optional<at::Tensor>& scale,
                  std::optional<int64_t> dim, bool is_power, const at::Tensor& out,
                  const at::Tensor& descale, const at::Tensor& amax) {
  Pieces pieces(input, dim, out, input);
  auto& call = pieces.call;
  call.is_power = is_power;
  const at::Tensor scales = scale ? scale->contiguous() : at::Tensor();
  call.amax = static_cast<unsigned*>(amax.mutable_data_ptr());
  C10_CUDA_CHECK(cudaMemsetAsync(call.amax, 0, amax.nbytes(), c10::cuda::getCurrentCUDAStream()));
  call.descales = descale.mutable_data_ptr<float>();
  const auto dtype = input.scalar_type();
  if (scale) {
    call.scales = scales.const_data_ptr<float>();
  } else {
    pieces.launch(amax_kernel(dtype, pieces.is_wide));
  }
  pieces.launch(cast_kernel(dtype, out.scalar_type(), pieces.is_wide));
}

void widen_fp8(const at::Tensor& input, const at::Tensor& descale, std::optional<int64_t> dim,
               const at::Tensor& out, const at::Tensor& amax) {
  Pieces pieces(input, dim, out, out);
  if (amax.defined()) pieces.call.amax = static_cast<unsigned*>(amax.mutable_data_ptr());
  const at::Tensor descales = descale.contiguous();
  pieces.call.scales = descales.const_data_ptr<float>();
  pieces.launch(uncast_kernel(input.scalar_type(), out.scalar_type(), pieces.is_wide));
}

Fp8Numbers make_fp8_numbers(const Fp8NumbersGiven& given) {
  static const DeviceKernel kernel(kFp8Images, "fp8_numbers");
  constexpr int64_t kStep = kBytes / static_cast<int64_t>(sizeof(float));
  const at::Tensor& like = given.descale_query;
  const at::Tensor memory = empty_numbers(kMaxNumbers * kStep, at::kFloat, like);
  Fp8Numbers made;
  made.amax = empty_numbers(1, at::kFloat, like);
  made.amax_out = empty_numbers(1, at::kFloat, like);
  for (int64_t i = 0; i < kMaxNumbers; ++i) made.numbers[i] = memory.narrow(0, i * kStep, 1);
  Fp8NumbersCall call{};
  call.descale_query = given.descale_query.const_data_ptr<float>();
  call.descale_key = given.descale_key.const_data_ptr<float>();
  if (given.descale_value.defined()) {
    call.descale_value = given.descale_value.const_data_ptr<float>();
  }
  if (given.scale_out) call.scale_out = given.scale_out->const_data_ptr<float>();
  call.numbers = memory.mutable_data_ptr<float>();
  call.amax = made.amax.mutable_data_ptr<float>();
  call.amax_out = made.amax_out.mutable_data_ptr<float>();
  call.scale = given.scale;
  call.is_scaled = given.is_scaled;
  call.is_widened = given.is_widened;
  if (given.lengths.defined() || given.lengths_kv.defined()) {
    made.lengths = empty_numbers(given.batch, at::kInt, like);
    made.lengths_kv = empty_numbers(given.batch, at::kInt, like);
    call.told = made.lengths.mutable_data_ptr<int>();
    call.told_kv = made.lengths_kv.mutable_data_ptr<int>();
    if (given.lengths.defined()) call.lengths = given.lengths.const_data_ptr<int>();
    if (given.lengths_kv.defined()) call.lengths_kv = given.lengths_kv.const_data_ptr<int>();
    call.batch = static_cast<int>(given.batch);
    call.queries = static_cast<int>(given.queries);
    call.keys = static_cast<int>(given.keys);
  }
  void* argument = &call;
  kernel.launch(1, 1, kThreads, &argument);
  return made;
}

}  // namespace cudnn_ops
