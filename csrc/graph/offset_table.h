// What a graph with ragged offsets needs to know of its sequences at run time: where each begins in
// each tensor, and its length. All sequences are the same distance apart; all have the same length,
// or lengths that lie on the device. The graph may be declared for more sequences than there are:
// the rest are empty.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

namespace cudnn_ops::graph {

// Queues a copy of the words to the current device, on the current stream, without waiting for it.
// A CUDA graph that is being captured gets its own copy of them as a source.
void upload(c10::ArrayRef<int64_t> words, void* place, bool capturing);

class OffsetTable {
 public:
  OffsetTable(int64_t batch, int64_t declared_batch)
      : batch_(batch), declared_batch_(declared_batch) {
  }

  // Int64 [declared_batch + 1]: `step` elements from one sequence to the next.
  void add_offsets(int64_t step);
  // Int32 [declared_batch].
  void add_lengths(int64_t length);
  // Likewise, from int32 [batch] on the device: upload() queues a copy of these.
  void add_lengths(const void* lengths);

  // Copies the table to the current device, on the current stream, without waiting for it. The
  // return value owns the copy; the columns' addresses, in the order in which they were added, are
  // appended to `pointers`. A CUDA graph that is being captured gets its own copy as a source.
  c10::DataPtr upload(c10::SmallVectorImpl<void*>& pointers, bool capturing) const;

 private:
  struct Column {
    bool is_offsets;
    int64_t value;       // step or length
    size_t start;        // in words
    const void* source;  // of lengths on the device, else null
  };

  // False when there is an equal column, which then serves for both.
  bool begin_column(bool is_offsets, int64_t value, const void* source = nullptr);

  int64_t batch_, declared_batch_;
  c10::SmallVector<int64_t, 256> words_;
  c10::SmallVector<Column, 16> columns_;
};

}  // namespace cudnn_ops::graph
