// The argument of the kernels of gated.cu, for both sides.
#pragma once

// Tensors of rows; strides in elements, from row to row.
struct GatedCall {
  const void *gate, *up, *grad_out;  // grad_out: of the backward
  void *first, *second;              // the output; or the gradients of gate and up
  long long gate_stride, up_stride, grad_stride, out_stride;
  long long pieces, pieces_per_row;  // in all rows, and in one, each of the kernel's vector width
};
