#include "kernels/moe_rows.h"

#include "kernels/device_kernel.h"
#include "kernels/moe_rows_call.h"
#include "moe_combine_images.h"
#include "moe_scatter_images.h"

namespace cudnn_ops {
namespace {

constexpr int kThreads = 256, kWarp = 32;
constexpr int64_t kBytes = 16;

struct CombineKernels {
  DeviceKernel forward, backward;
};

const CombineKernels& kernels_of(at::ScalarType dtype, bool is_wide) {
#define CUDNN_OPS_COMBINE(type)                                                                    \
  {                                                                                                \
    {kMoeCombineImages, "moe_combine_" type}, {kMoeCombineImages, "moe_combine_" type "_backward"} \
  }
  static const CombineKernels kernels[3][2] = {
      {CUDNN_OPS_COMBINE("half_1"), CUDNN_OPS_COMBINE("half_8")},
      {CUDNN_OPS_COMBINE("bfloat16_1"), CUDNN_OPS_COMBINE("bfloat16_8")},
      {CUDNN_OPS_COMBINE("float_1"), CUDNN_OPS_COMBINE("float_4")}};
#undef CUDNN_OPS_COMBINE
  return kernels[type_index(dtype)][is_wide];
}

const DeviceKernel& scatter_kernel(int64_t unit) {
  static const DeviceKernel kernels[4] = {{kMoeScatterImages, "moe_scatter_2"},
                                          {kMoeScatterImages, "moe_scatter_4"},
                                          {kMoeScatterImages, "moe_scatter_8"},
                                          {kMoeScatterImages, "moe_scatter_16"}};
  int index = 0;
  while ((int64_t{2} << index) < unit) ++index;
  return kernels[index];
}

// With a dense last dimension.
at::Tensor with_dense_rows(const at::Tensor& matrix) {
  return matrix.stride(1) == 1 || matrix.size(1) == 1 ? matrix : matrix.contiguous();
}

// Of rows one behind the other the stride is the length, whatever it says of a single one.
int64_t stride_of(const at::Tensor& matrix) {
  return matrix.size(0) == 1 ? matrix.size(1) : matrix.stride(0);
}

// The bits that are set in the address of some row, or in the length of all.
uint64_t address_bits(const at::Tensor& matrix) {
  const auto bytes = static_cast<int64_t>(matrix.element_size());
  return reinterpret_cast<uintptr_t>(matrix.const_data_ptr()) |
         static_cast<uint64_t>((stride_of(matrix) | matrix.size(1)) * bytes);
}

MoePositions describe(const at::Tensor& positions, int64_t rows) {
  return {static_cast<const int*>(positions.const_data_ptr()),
          static_cast<unsigned>(positions.size(1)), static_cast<unsigned>(rows)};
}

void* data_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

at::Tensor contiguous_if_any(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.contiguous() : tensor;
}

}  // namespace

void scatter_tokens(const at::Tensor& tokens, const at::Tensor& positions, const at::Tensor& rows) {
  const at::Tensor from = with_dense_rows(tokens), places = positions.contiguous();
  const auto element = static_cast<int64_t>(from.element_size());
  const uint64_t bits = address_bits(from) | address_bits(rows);
  int64_t unit = kBytes;
  while (bits % static_cast<uint64_t>(unit) != 0) unit /= 2;
  const int64_t of_row = rows.size(1) * element / unit;
  MoeScatterCall call{from.const_data_ptr(),          rows.mutable_data_ptr(),
                      describe(places, rows.size(0)), stride_of(from) * element / unit,
                      from.size(0) * of_row,          static_cast<unsigned>(of_row)};
  void* argument = &call;
  scatter_kernel(unit).launch(divide_up(call.units, kThreads), 1, kThreads, &argument);
}

void combine_rows(const at::Tensor& rows, const at::Tensor& positions, const at::Tensor& weights,
                  const at::Tensor& tokens) {
  const at::Tensor from = with_dense_rows(rows), places = positions.contiguous();
  const at::Tensor factors = contiguous_if_any(weights);
  const bool is_wide = (address_bits(from) | address_bits(tokens)) % kBytes == 0;
  const int64_t width = is_wide ? kBytes / static_cast<int64_t>(from.element_size()) : 1;
  const int64_t of_row = from.size(1) / width;
  MoeCombineCall call{from.const_data_ptr(),
                      factors.defined() ? factors.const_data_ptr() : nullptr,
                      tokens.mutable_data_ptr(),
                      describe(places, from.size(0)),
                      stride_of(from),
                      tokens.size(0) * of_row,
                      static_cast<unsigned>(of_row),
                      factors.defined() && factors.scalar_type() == at::kFloat};
  void* argument = &call;
  kernels_of(from.scalar_type(), is_wide)
      .forward.launch(divide_up(call.pieces, kThreads), 1, kThreads, &argument);
}

void combine_rows_backward(const at::Tensor& grad_tokens, const at::Tensor& rows,
                           const at::Tensor& positions, const at::Tensor& weights,
                           const at::Tensor& grad_rows, const at::Tensor& grad_weights) {
  const at::Tensor grads = with_dense_rows(grad_tokens), places = positions.contiguous();
  const at::Tensor factors = weights.contiguous();
  const bool reads_rows = grad_weights.defined();
  const at::Tensor values = reads_rows ? with_dense_rows(rows) : at::Tensor();
  uint64_t bits = address_bits(grads);
  if (reads_rows) bits |= address_bits(values);
  if (grad_rows.defined()) bits |= address_bits(grad_rows);
  const bool is_wide = bits % kBytes == 0;
  const int64_t width = is_wide ? kBytes / static_cast<int64_t>(grads.element_size()) : 1;
  MoeCombineBackwardCall call{
      grads.const_data_ptr(), reads_rows ? values.const_data_ptr() : nullptr,
      factors.const_data_ptr(), data_of(grad_rows), data_of(grad_weights),
      // As many rows as there are positions.
      describe(places, places.numel()), stride_of(grads), reads_rows ? stride_of(values) : 0,
      places.numel(), static_cast<unsigned>(grads.size(1) / width),
      factors.scalar_type() == at::kFloat};
  void* argument = &call;
  kernels_of(grads.scalar_type(), is_wide)
      .backward.launch(divide_up(call.pairs, kThreads / kWarp), 1, kThreads, &argument);
}

}  // namespace cudnn_ops
