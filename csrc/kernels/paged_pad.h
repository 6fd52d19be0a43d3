// Page tables and lengths of a batch as a plan declares them, by one kernel (paged_pad.cu).
#pragma once

#include <ATen/core/Tensor.h>

namespace cudnn_ops {

struct PaddedTable {
  at::Tensor page_table;               // int32 [batch, width]
  at::Tensor seq_lens_kv, seq_lens_q;  // int32 [batch]
};

// What the plan is told beyond, or in place of, the caller's arguments.
struct TablePadding {
  int64_t batch, width;  // declared
  int64_t page_size;
  int64_t queries;  // of each sequence that exists
  int64_t hidden;   // keys at the end of each sequence that the plan does not see
  int64_t most;     // of the others, the plan sees at most the first `most`; -1: all
};

// On the current device and stream.
PaddedTable pad_table(const at::Tensor& page_table, const at::Tensor& seq_lens_kv,
                      const TablePadding& padding);

}  // namespace cudnn_ops
