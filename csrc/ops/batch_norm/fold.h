// cudnn_ops::_fold_batch_norms, which folds batch norms in evaluation into the convolutions before
// them; see cudnn_ops/ops/_batch_norm_fold.py.
#pragma once

#include "ops/operator.h"

#include <ATen/core/List.h>

#include <vector>

namespace cudnn_ops {

using OptionalTensors = c10::List<OptionalTensor>;

// The function's type: the weights and then the biases, of lists that are as long as each other.
using FoldBatchNorms = std::vector<at::Tensor>(at::TensorList weights,
                                               const OptionalTensors& biases, at::TensorList means,
                                               at::TensorList vars,
                                               const OptionalTensors& norm_weights,
                                               const OptionalTensors& norm_biases,
                                               at::ArrayRef<double> eps);

}  // namespace cudnn_ops
