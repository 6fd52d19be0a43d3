// A built cuDNN execution plan: ask for its workspace, execute it.
//
// Immutable once built, so any number of threads may execute one plan at once, each with its
// own handle, pointers and workspace.
#pragma once

#include <c10/util/ArrayRef.h>
#include <cudnn_graph.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace cudnn_ops::graph {

class FrontendGraph;
class Target;

class Plan {
 public:
  // Builds the best plan that cuDNN's heuristics offer for `graph`, a graph made for `target`,
  // compiling kernels as needed (0.4 s). Throws NotSupported with cuDNN's reason. Defined in
  // plan_build.cpp.
  static std::shared_ptr<const Plan> build(std::shared_ptr<FrontendGraph> graph,
                                           const Target& target);

  // Bytes of scratch memory that execute() needs, aligned to 16 bytes.
  int64_t workspace_bytes() const {
    return workspace_bytes_;
  }
  // cuDNN's name of the engine and its knobs, such as "eng8_k24=0".
  const std::string& engine() const {
    return engine_;
  }

  // Queues the plan on the stream of `handle`. `pointers` holds one address for each tensor
  // of the graph, in ascending uid order: host addresses for values passed by value, device
  // addresses, aligned to 16 bytes, for the rest. `capturing` says that the stream is being
  // captured into a CUDA graph, which then keeps the plan's code alive.
  void execute(cudnnHandle_t handle, c10::ArrayRef<void*> pointers, void* workspace,
               bool capturing) const;

 private:
  Plan() = default;

  static constexpr size_t kMaxTensors = 64;
  using FrontendExecute = std::function<void(cudnnHandle_t, void**, int, void*)>;

  cudnnBackendDescriptor_t descriptor_ = nullptr;  // owned by what frontend_execute_ holds
  FrontendExecute frontend_execute_;
  bool needs_frontend_ = false;  // the frontend has kernels of its own to run before cuDNN's
  std::string engine_;
  int64_t workspace_bytes_ = 0;
  int64_t frontend_workspace_ = 0;                        // leading part that the frontend uses
  std::vector<int64_t> uids_;                             // every tensor, internal ones too
  std::vector<void*> pointers_;                           // constants filled in, the rest null
  std::vector<int> user_slots_;                           // where execute()'s pointers go
  std::vector<std::pair<int, int64_t>> workspace_slots_;  // slot, offset into the workspace
};

}  // namespace cudnn_ops::graph
