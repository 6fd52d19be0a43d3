#include "varlen_table.h"

#include "../graph/cuda_call.h"
#include "../graph/ragged_table.h"

#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sub.h>

#include <algorithm>

namespace cudnn_ops {
namespace {

at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& like) {
  return at::detail::empty_cuda(sizes, dtype, like.device(), std::nullopt);
}

}  // namespace

bool are_same_tokens(const Varlen& args) {
  const auto &q = args.cu_seqlens_q, &k = args.cu_seqlens_k;
  return !args.seqused_q && !args.seqused_k && q.const_data_ptr() == k.const_data_ptr() &&
         q.scalar_type() == k.scalar_type() && q.strides() == k.strides();
}

void VarlenTable::add_offsets(const at::Tensor& packed, bool of_keys) {
  add_offsets(packed.size(0) > 1 ? packed.stride(0) : packed.numel(), of_keys);
}

void VarlenTable::add_offsets(int64_t step, bool of_keys) {
  const size_t side = of_keys && !same_ ? 1 : 0;
  auto& steps = steps_[side];
  const auto found = std::find(steps.begin(), steps.end(), step);
  rows_.push_back({side, static_cast<size_t>(found - steps.begin())});
  if (found == steps.end()) steps.push_back(step);
}

// A row a step. Few kernels: they are small change only beside a large attention.
at::Tensor VarlenTable::offsets(size_t side) const {
  const at::Tensor& given = side == 0 ? args_.cu_seqlens_q : args_.cu_seqlens_k;
  const auto& steps = steps_[side];
  const auto rows = static_cast<int64_t>(steps.size());
  const at::Tensor factors = empty({rows, 1}, at::kLong, given);
  graph::upload(steps, factors.mutable_data_ptr(), graph::is_capturing());
  const int64_t width = (declared_ + 2) / 2 * 2;  // each row at a multiple of 16 bytes
  const at::Tensor table = empty({rows, width}, at::kLong, given);
  const int64_t count = given.size(0);
  at::Tensor own = table.narrow(1, 0, count);
  at::mul_out(own, factors, given.unsqueeze(0));
  if (count < width) {
    table.narrow(1, count, width - count).copy_(table.narrow(1, count - 1, 1));
  }
  return table;
}

at::Tensor VarlenTable::lengths(size_t side) const {
  const at::Tensor& given = side == 0 ? args_.cu_seqlens_q : args_.cu_seqlens_k;
  const OptionalTensor& used = side == 0 ? args_.seqused_q : args_.seqused_k;
  const int64_t count = given.size(0) - 1;
  const at::Tensor result = empty({declared_}, at::kInt, given);
  at::Tensor own = result.narrow(0, 0, count);
  if (used) {
    own.copy_(*used);
  } else {
    at::sub_out(own, given.narrow(0, 1, count), given.narrow(0, 0, count));
  }
  if (count < declared_) result.narrow(0, count, declared_ - count).zero_();
  return result;
}

void VarlenTable::make(c10::SmallVectorImpl<void*>& pointers) {
  for (size_t side = 0; side < (same_ ? 1 : 2); ++side) {
    offsets_[side] = offsets(side);
    lengths_[side] = lengths(side);
  }
  for (const auto& row : rows_) {
    const at::Tensor& table = offsets_[row.side];
    pointers.push_back(table.mutable_data_ptr<int64_t>() +
                       static_cast<int64_t>(row.number) * table.size(1));
  }
  pointers.push_back(lengths_[0].mutable_data_ptr());
  pointers.push_back(lengths_[same_ ? 0 : 1].mutable_data_ptr());
}

}  // namespace cudnn_ops
