// The argument of the kernel of paged_pad.cu, for both sides.
#pragma once

struct PagedPadCall {
  const int* page_table;  // [batch, width], rows row_stride apart
  long long row_stride;
  const int* seq_lens_kv;  // [batch]
  int batch, width, page_size;
  int hidden;          // keys at the end of each sequence that the plan does not see
  int most;            // of the others, the plan sees at most so many
  int declared_width;  // of a row of padded_table
  int* padded_table;
  int *padded_lens, *query_lens;
  int queries;  // of each sequence that exists
};
