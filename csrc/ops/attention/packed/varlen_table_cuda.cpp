#include "ops/attention/packed/varlen_table.h"

#include "ops/attention/packed/varlen_problem.h"

#include "graph/cuda_call.h"
#include "graph/offset_table.h"

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

size_t SequenceTable::add_offsets(const at::Tensor& packed) {
  return add_offsets(packed.size(0) > 1 ? packed.stride(0) : packed.numel());
}

size_t SequenceTable::add_offsets(int64_t step) {
  const auto found = std::find(steps_.begin(), steps_.end(), step);
  const auto row = static_cast<size_t>(found - steps_.begin());
  if (found == steps_.end()) steps_.push_back(step);
  return row;
}

// Few kernels: they are small change only beside a large attention.
void SequenceTable::make() {
  const auto rows = static_cast<int64_t>(steps_.size());
  const at::Tensor factors = empty({rows, 1}, at::kLong, given_);
  graph::upload(steps_, factors.mutable_data_ptr(), graph::is_capturing());
  const int64_t width = (declared_ + 2) / 2 * 2;  // each row at a multiple of 16 bytes
  offsets_ = empty({rows, width}, at::kLong, given_);
  const int64_t starts = given_.size(0), count = starts - 1;
  at::Tensor own_offsets = offsets_.narrow(1, 0, starts);
  const at::Tensor first = last_token_ < 0 ? given_ : given_.clamp_max(last_token_);
  at::mul_out(own_offsets, factors, first.unsqueeze(0));
  if (starts < width) {
    offsets_.narrow(1, starts, width - starts).copy_(offsets_.narrow(1, count, 1));
  }
  lengths_ = empty({declared_}, at::kInt, given_);
  at::Tensor own_lengths = lengths_.narrow(0, 0, count);
  if (used_) {
    own_lengths.copy_(*used_);
  } else {
    at::sub_out(own_lengths, given_.narrow(0, 1, count), given_.narrow(0, 0, count));
  }
  if (count < declared_) lengths_.narrow(0, count, declared_ - count).zero_();
}

void* SequenceTable::offsets(size_t row) const {
  return offsets_.mutable_data_ptr<int64_t>() + static_cast<int64_t>(row) * offsets_.size(1);
}

void* SequenceTable::lengths() const {
  return lengths_.mutable_data_ptr();
}

VarlenTable::VarlenTable(const Varlen& args, int64_t declared)
    : queries_(args.cu_seqlens_q, args.seqused_q, declared) {
  if (!are_same_tokens(args)) keys_.emplace(args.cu_seqlens_k, args.seqused_k, declared);
}

void VarlenTable::require_keys(int64_t keys) {
  requires_keys_ = true;
  (keys_ ? *keys_ : queries_).end_at(keys - 1);
}

void VarlenTable::make(c10::SmallVectorImpl<void*>& pointers) {
  queries_.make();
  if (keys_) keys_->make();
  for (const auto& row : rows_) {
    pointers.push_back((row.is_key ? *keys_ : queries_).offsets(row.number));
  }
  lengths_kv_ = (keys_ ? *keys_ : queries_).length_tensor();
  if (requires_keys_) {
    if (keys_) queries_.length_tensor().mul_(lengths_kv_.gt(0));
    lengths_kv_ = lengths_kv_.clamp_min(1);
  }
  pointers.push_back(queries_.lengths());
  pointers.push_back(lengths_kv_.mutable_data_ptr());
}

}  // namespace cudnn_ops
