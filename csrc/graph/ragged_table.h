// What a ragged graph is told of its sequences at run time: where each begins in each tensor,
// and how long each is. Every sequence has the same distance from the one before; all have the
// same length, or lengths that the device knows. The graph may be declared for more of them than
// there are: the rest are empty.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

namespace cudnn_ops::graph {

// Queues a copy of the words to the current device, on the current stream, without waiting for it.
// A CUDA graph that is being captured gets words of its own to copy from.
void upload(c10::ArrayRef<int64_t> words, void* place, bool capturing);

class RaggedTable {
 public:
  RaggedTable(int64_t batch, int64_t declared_batch)
      : batch_(batch), declared_batch_(declared_batch) {
  }

  // Int64 [declared_batch + 1]: `step` elements from one sequence to the next.
  void add_offsets(int64_t step);
  // Int32 [declared_batch].
  void add_lengths(int64_t length);
  // Likewise, from int32 [batch] on the device, which upload() queues a copy of.
  void add_lengths(const void* lengths);

  // Copies the table to the current device, on the current stream, without waiting for it. What
  // is returned keeps it there; the columns' addresses, in the order in which they were added,
  // are appended to `pointers`. While a CUDA graph is captured the graph gets a copy of its own.
  c10::DataPtr upload(c10::SmallVectorImpl<void*>& pointers, bool capturing) const;

 private:
  struct Column {
    bool is_offsets;
    int64_t value;       // step or length
    size_t start;        // in words
    const void* source;  // of lengths that the device knows, else null
  };

  // False when an equal column is there, which then serves for both.
  bool begin_column(bool is_offsets, int64_t value, const void* source = nullptr);

  int64_t batch_, declared_batch_;
  c10::SmallVector<int64_t, 256> words_;
  c10::SmallVector<Column, 16> columns_;
};

}  // namespace cudnn_ops::graph
