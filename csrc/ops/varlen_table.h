// Where packed sequences begin and how long they are, as cuDNN reads it: made on the device from
// the offsets that are there, so that the host reads none of them.
#pragma once

#include "varlen.h"

#include <array>

namespace cudnn_ops {

// Whether queries and keys are the same tokens, so that each finds itself and nothing is unwritten.
bool are_same_tokens(const Varlen& args);

class VarlenTable {
 public:
  // What is declared beyond the sequences that there are is empty.
  VarlenTable(const Varlen& args, int64_t declared_sequences)
      : args_(args), declared_(declared_sequences), same_(are_same_tokens(args)) {
  }

  // Of a packed tensor, or of one with `step` elements from a token to the next.
  void add_offsets(const at::Tensor& packed, bool of_keys);
  void add_offsets(int64_t step, bool of_keys);

  // Fills the table, and appends the addresses of the offsets, int64 [sequences + 1] in elements,
  // in the order in which they were added; and those of the lengths of queries and of keys, int32
  // [sequences]. They stay as long as this does.
  void make(c10::SmallVectorImpl<void*>& pointers);

 private:
  struct Row {
    size_t side, number;
  };

  at::Tensor offsets(size_t side) const;
  at::Tensor lengths(size_t side) const;

  const Varlen& args_;
  int64_t declared_;
  bool same_;
  // Of the queries, and of the keys unless they are the same tokens.
  std::array<c10::SmallVector<int64_t, 8>, 2> steps_;
  std::array<at::Tensor, 2> offsets_, lengths_;
  c10::SmallVector<Row, 16> rows_;
};

}  // namespace cudnn_ops
