// What the kernels of moe_scatter.cu and moe_combine.cu are called with, for both sides.
#pragma once

// A token has a row for each of its experts. Where these rows are, for each token: a position, or
// ~position of a row that no expert computes.
struct MoePositions {
  const int* of_pairs;  // [tokens, experts of each]
  unsigned of_token;    // experts of each token
  unsigned rows;
};

// A copy of each token's row for each of its experts; zeros where it has none.
struct MoeScatterCall {
  const void* tokens;
  void* rows;
  MoePositions positions;
  long long stride;  // of the tokens, in units of a copy
  long long units;   // of all tokens
  unsigned of_row;   // units of a row
};

// Strides in numbers.
struct MoeCombineCall {
  const void* rows;
  const void* weights;  // [tokens, experts of each]; null: 1
  void* tokens;
  MoePositions positions;
  long long stride;  // of the rows
  long long pieces;  // of all tokens
  unsigned of_row;   // pieces of a row
  bool is_weight_float;
};

struct MoeCombineBackwardCall {
  const void *grad_tokens, *rows, *weights;
  void *grad_rows, *grad_weights;  // null: not wanted
  MoePositions positions;
  long long grad_stride, stride;  // of the tokens, and of the rows
  long long pairs;
  unsigned of_row;  // pieces of a row
  bool is_weight_float;
};
