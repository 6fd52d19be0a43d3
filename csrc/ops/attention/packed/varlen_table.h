// Where packed sequences begin and how long they are, as cuDNN reads it: made on the device from
// the offsets that are there, so that the host reads none of them.
#pragma once

#include "ops/attention/packed/varlen.h"

#include <optional>

namespace cudnn_ops {

// Sequences that lie one behind the other: the offsets in each tensor that holds them, int64
// [declared + 1] in elements, and their lengths, int32 [declared]. What is declared beyond the
// sequences that there are is empty. It stays as long as this does.
class SequenceTable {
 public:
  // `used`: how many tokens of each sequence there are, from its beginning; without it all.
  SequenceTable(const at::Tensor& offsets, const OptionalTensor& used, int64_t declared)
      : given_(offsets), used_(used), declared_(declared) {
  }

  // Adds a packed tensor, or one with `step` elements from a token to the next. Returns its row.
  size_t add_offsets(const at::Tensor& packed);
  size_t add_offsets(int64_t step);
  // Those that would begin behind this token, which are empty, begin with it. Before make().
  void end_at(int64_t token) {
    last_token_ = token;
  }
  // Fills the table; then the addresses are there.
  void make();
  void* offsets(size_t row) const;
  void* lengths() const;
  const at::Tensor& length_tensor() const {
    return lengths_;
  }

 private:
  const at::Tensor& given_;
  const OptionalTensor& used_;
  int64_t declared_;
  int64_t last_token_ = -1;  // no end
  c10::SmallVector<int64_t, 8> steps_;
  at::Tensor offsets_, lengths_;
};

// Both sides of a call.
class VarlenTable {
 public:
  VarlenTable(const Varlen& args, int64_t declared);

  // Says of a sequence without keys that it has one, of this many there are, and no queries:
  // cuDNN's FP8 kernel for Hopper does not end where queries have no key. Before make().
  void require_keys(int64_t keys);
  template <class TensorOrStep>
  void add_offsets(const TensorOrStep& packed, bool of_keys) {
    const bool is_key = of_keys && keys_;
    rows_.push_back({is_key, (is_key ? *keys_ : queries_).add_offsets(packed)});
  }
  // Appends the addresses of the offsets in the order in which they were added, and those of the
  // lengths of queries and of keys.
  void make(c10::SmallVectorImpl<void*>& pointers);

 private:
  struct Row {
    bool is_key;
    size_t number;
  };

  SequenceTable queries_;
  std::optional<SequenceTable> keys_;  // none where they are the same tokens
  at::Tensor lengths_kv_;
  bool requires_keys_ = false;
  c10::SmallVector<Row, 16> rows_;
};

}  // namespace cudnn_ops
