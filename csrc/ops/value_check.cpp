#include "ops/value_check.h"

#include <cstdlib>
#include <cstring>

namespace cudnn_ops {

bool checks_values() {
  const char* value = std::getenv("CUDNN_OPS_CHECK");
  return value != nullptr && std::strcmp(value, "") != 0 && std::strcmp(value, "0") != 0;
}

bool checks_values(const at::Tensor& tensor) {
  // A compiler's tensors, subclasses of torch.Tensor, have none.
  if (tensor.is_meta() || tensor.unsafeGetTensorImpl()->is_python_dispatch()) return false;
  return tensor.is_cpu() || checks_values();
}

}  // namespace cudnn_ops
