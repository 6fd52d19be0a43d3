// The two ways in which cuDNN says no, as C++ exceptions. Operators turn them into
// Python exceptions that name their arguments; `explain` turns the first into an answer.
#pragma once

#include <cudnn_graph.h>

#include <stdexcept>
#include <string>

namespace cudnn_ops::graph {

// cuDNN does not take this graph on this target. what() is cuDNN's own reason.
class NotSupported : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// libcudnn could not be loaded, or a call into it failed. what() says which and why.
class CudnnError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws CudnnError, with cuDNN's last message, unless `status` is success.
void check(cudnnStatus_t status, const char* call);

// Boils the frontend's many-line report down to the sentence that says what is wrong.
std::string readable_reason(const std::string& report);

}  // namespace cudnn_ops::graph
