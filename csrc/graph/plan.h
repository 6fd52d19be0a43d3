// A built cuDNN execution plan: ask for its workspace, execute it, write it to a file.
//
// Immutable once built, so any number of threads may execute one plan at once, each with its
// own handle, pointers and workspace: a call makes a variant pack of its own and cuDNN only reads
// the plan. Torch keeps plans apart by thread, so this is measured (tests/test_plan_threads.py).
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>
#include <cudnn_graph.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace cudnn_ops::graph {

class FrontendGraph;
class Target;

// How a plan's engine was chosen.
enum class EngineChoice : uint8_t {
  kHeuristic,  // the first that cuDNN's heuristics name and that builds
  kTable,      // the one that the table of tuned engines names (engine_table.h), or the operator
  kMeasured,   // the fastest of those that the heuristics name, measured here
};

class Plan {
 public:
  // Builds a plan for `graph`, a graph made for `target`, compiling kernels as needed (0.4 s):
  // with `engine` (a name as engine() gives it) where cuDNN has that, offered by its heuristics or
  // not, else with the best that they know. Throws NotSupported with cuDNN's reason, and CudnnError
  // where none of them could be built because something failed.
  static std::shared_ptr<const Plan> build(std::shared_ptr<FrontendGraph> graph,
                                           const Target& target, const std::string& engine);

  // Builds every plan that the heuristics offer, best guess first, or those that there are to fall
  // back on where they offer none, then those with `more_engines` that cuDNN has; where kernels are
  // to be compiled, in several threads, each of which asks for its target itself. Empty where there
  // is no graph; throws as build() does.
  static std::vector<std::shared_ptr<const Plan>> build_all(
      c10::function_ref<std::shared_ptr<FrontendGraph>(const Target&)> make_graph,
      c10::function_ref<Target()> target_here, const std::vector<std::string>& more_engines);

  // The plan as bytes, compiled kernels and all (100 kB), with `choice` noted in them. Empty when
  // the plan cannot be written, as when the frontend has kernels of its own in it. It is cuDNN's
  // format: only the same cuDNN and GPU may read it back. Not for two threads at once.
  std::string serialize(EngineChoice choice) const;

  // The plan that serialize() wrote, in 2 ms; `origin` names what the bytes were read from. Throws
  // CudnnError where they are no such plan.
  static std::shared_ptr<const Plan> deserialize(const std::string& bytes, const Target& target,
                                                 const std::string& origin);
  // What serialize() noted. Throws CudnnError likewise.
  static EngineChoice choice_in(const std::string& bytes);

  // Bytes of scratch memory that execute() needs, aligned to 16 bytes.
  int64_t workspace_bytes() const {
    return workspace_bytes_;
  }
  // cuDNN's name of the engine and its knobs, such as "eng8_k24=0".
  const std::string& engine() const {
    return engine_;
  }
  // Whether an engine that might have been preferred failed for a reason of its own, such as no
  // memory: then this plan is not one to keep for other processes.
  bool is_makeshift() const {
    return !preferred_failed_.empty();
  }
  // Why that engine failed, where is_makeshift().
  const std::string& preferred_failed() const {
    return preferred_failed_;
  }
  // Unloads the other plans of the same graph, which build_all() gave. None may be in use.
  void drop_rivals() const;
  // What deserialize() was told: "store", or PlanBundle::label(). Empty for a plan that was built.
  const std::string& origin() const {
    return origin_;
  }

  // Queues the plan on the stream of `handle`. `pointers` holds one address for each tensor
  // of the graph, in ascending uid order: host addresses for values passed by value, device
  // addresses, aligned to 16 bytes, for the rest. `capturing` says that the stream is being
  // captured into a CUDA graph, which then keeps the plan's code alive.
  void execute(cudnnHandle_t handle, c10::ArrayRef<void*> pointers, void* workspace,
               bool capturing) const;

 private:
  static constexpr size_t kMaxTensors = 64;

  // The plan at `index` of the graph's list, which is built; without what only a graph that was
  // not read back knows: engine and workspace, which of() asks it for.
  Plan(std::shared_ptr<FrontendGraph> graph, int64_t index);
  static std::shared_ptr<Plan> of(std::shared_ptr<FrontendGraph> graph, int64_t index);
  void execute_by_frontend(cudnnHandle_t handle, c10::ArrayRef<void*> pointers,
                           void* workspace) const;

  std::shared_ptr<FrontendGraph> graph_;  // owns what descriptor_ and pointers_ point to
  int64_t index_ = 0;                     // of this plan in the graph's list
  cudnnBackendDescriptor_t descriptor_ = nullptr;
  bool needs_frontend_ = false;  // the frontend has kernels of its own to run before cuDNN's
  std::string engine_, origin_;
  std::string preferred_failed_;
  int64_t workspace_bytes_ = 0;
  int64_t frontend_workspace_ = 0;                        // leading part that the frontend uses
  std::vector<int64_t> uids_;                             // every tensor, internal ones too
  std::vector<void*> pointers_;                           // constants filled in, the rest null
  std::vector<int> user_slots_;                           // where execute()'s pointers go
  std::vector<std::pair<int, int64_t>> workspace_slots_;  // slot, offset into the workspace
};

}  // namespace cudnn_ops::graph
