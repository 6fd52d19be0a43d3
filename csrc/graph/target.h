// What a plan is built for: the GPU that is there, or one described by a file.
#pragma once

#include <cudnn_graph.h>

#include <cstdint>
#include <memory>
#include <string>

namespace cudnn_frontend {
class DeviceProperties;
}

namespace cudnn_ops::graph {

class Target {
 public:
  // Device `device`, the current one of `handle`. `sm_version` is major * 10 + minor; `gpu` says
  // all of the GPU and its driver that a compiled plan may depend on.
  static Target live(int device, cudnnHandle_t handle, int sm_version, std::string gpu);

  // A GPU described by the JSON text that cuDNN writes for one (DeviceProperties::serialize).
  // Throws NotSupported when cuDNN cannot read it.
  static Target described(const std::string& json);

  // What a plan's key says of its target: the live device's index, or for a described GPU a
  // negative number made from its description. Good within this process only.
  int64_t id() const {
    return id_;
  }
  // Null for a described GPU.
  cudnnHandle_t handle() const {
    return handle_;
  }
  int sm_version() const {
    return sm_version_;
  }
  // The JSON text of a described GPU; empty for the live one.
  const std::string& description() const {
    return description_;
  }
  // The GPU, in words that mean the same in every process.
  const std::string& gpu() const {
    return gpu_;
  }
  // Null for the live GPU.
  const std::shared_ptr<cudnn_frontend::DeviceProperties>& properties() const {
    return properties_;
  }

 private:
  int64_t id_ = 0;
  cudnnHandle_t handle_ = nullptr;
  int sm_version_ = 0;
  std::string description_, gpu_;
  std::shared_ptr<cudnn_frontend::DeviceProperties> properties_;
};

// The JSON description of live device `index`, to be used as a described target elsewhere.
std::string describe_device(int index);

}  // namespace cudnn_ops::graph
