// Refusals and failures of cuDNN as C++ exceptions. Operators turn them into Python exceptions that
// name their arguments; `explain` turns the first into an answer.
#pragma once

#include <cudnn_graph.h>

#include <stdexcept>
#include <string>

namespace cudnn_ops::graph {

// cuDNN does not support this graph on this target. what() is cuDNN's own reason. It holds for as
// long as the process lives, so callers may remember it and choose another way.
class NotSupported : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// libcudnn could not be loaded, or a call into it failed: no memory, no NVRTC, an error of CUDA.
// what() says which and why. The same call may succeed the next time.
class CudnnError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws CudnnError, with cuDNN's last message, unless `status` is success.
void check(cudnnStatus_t status, const char* call);

// For error codes of the frontend that cover both: whether the statuses that its report names say
// that cuDNN does not support something, not that it failed. Where it names none: `otherwise`.
bool is_refusal(const std::string& report, bool otherwise);

// The sentence of the frontend's many-line report that says what is wrong; the whole report where
// the environment variable CUDNN_OPS_FULL_REASONS is set.
std::string readable_reason(const std::string& report);

}  // namespace cudnn_ops::graph
