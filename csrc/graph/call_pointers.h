// The addresses of a call, in the order of the plan's tensors, gathered from torch's.
#pragma once

#include "graph/cuda_call.h"

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

namespace cudnn_ops::graph {

struct CallPointers {
  c10::SmallVector<void*, 10> all;
  c10::SmallVector<Call::Written, 4> written;

  // What is not defined is not in the plan.
  void read(const at::Tensor& tensor) {
    if (tensor.defined()) all.push_back(const_cast<void*>(tensor.const_data_ptr()));
  }
  void write(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    written.push_back({all.size(), tensor.nbytes()});
    all.push_back(tensor.mutable_data_ptr());
  }
};

}  // namespace cudnn_ops::graph
