// What a ragged graph is told of its sequences at run time: where each begins in each tensor,
// and how long each is. Here every sequence has the same length and the same distance from the
// one before, and the graph may be declared for more of them than there are: the rest are empty.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

namespace cudnn_ops::graph {

class RaggedTable {
 public:
  RaggedTable(int64_t batch, int64_t declared_batch)
      : batch_(batch), declared_batch_(declared_batch) {
  }

  // Int64 [declared_batch + 1]: `step` elements from one sequence to the next.
  void add_offsets(int64_t step);
  // Int32 [declared_batch].
  void add_lengths(int64_t length);

  // Copies the table to the current device, on the current stream, without waiting for it. What
  // is returned keeps it there; the columns' addresses, in the order in which they were added,
  // are appended to `pointers`. While a CUDA graph is captured the graph gets a copy of its own.
  c10::DataPtr upload(c10::SmallVectorImpl<void*>& pointers, bool capturing) const;

 private:
  struct Column {
    bool is_offsets;
    int64_t value;  // step or length
    size_t start;   // in words
  };

  // False when an equal column is there, which then serves for both.
  bool begin_column(bool is_offsets, int64_t value);

  int64_t batch_, declared_batch_;
  c10::SmallVector<int64_t, 256> words_;
  c10::SmallVector<Column, 16> columns_;
};

}  // namespace cudnn_ops::graph
