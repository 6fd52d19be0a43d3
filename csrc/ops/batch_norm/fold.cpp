// The operator that folds batch norms in evaluation into the convolutions before them. The kernel
// for CUDA is in fold_cuda.cpp, those for CPUs and fake tensors are in
// cudnn_ops/ops/_batch_norm_fold.py.

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  m.def(
      "_fold_batch_norms(Tensor[] weights, Tensor?[] biases, Tensor[] means, Tensor[] vars, "
      "Tensor?[] norm_weights, Tensor?[] norm_biases, float[] eps) -> Tensor[]",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides});
}
