// The cuDNN Frontend, for the few files that build graphs: including it costs a minute of
// compile time. Nothing outside csrc/graph and the operators' *_graph.cpp includes this.
#pragma once

#include "graph/target.h"
#include "graph/tensor_desc.h"

#include <cudnn_frontend.h>

#include <memory>
#include <string>
#include <vector>

namespace cudnn_ops::graph {

namespace fe = cudnn_frontend;

// The frontend's graph, with the built plans within reach of Plan.
class FrontendGraph : public fe::graph::Graph {
 public:
  // Unloads every plan that was built but one.
  void keep_only(int64_t index) {
    for (size_t i = 0; i < plans.execution_plans.size(); ++i) {
      if (static_cast<int64_t>(i) != index) plans.execution_plans[i].reset();
    }
  }
  cudnnBackendDescriptor_t plan_descriptor(int64_t index) const {
    return plans.execution_plans[index]->get_raw_desc();
  }
  // No plan whose numbers come about in that way.
  void refuse(fe::NumericalNote_t note) {
    refused_.push_back(note);
  }
  const std::vector<fe::NumericalNote_t>& refused() const {
    return refused_;
  }
  // Only the plan, and not the structure of the graph: executing needs no more.
  fe::error_t serialize_plan(int64_t index, std::vector<uint8_t>& data) {
    plans.candidate = index;
    return serialize(data, /*serialize_structure=*/false);
  }
  // Leading bytes of the workspace that belong to the frontend's own tensors.
  int64_t frontend_workspace() const {
    return get_fe_workspace_size_subtree();
  }
  // Whether execute() must copy or clear some of those tensors before cuDNN runs. A graph that
  // was read back knows nothing of this, and Plan writes none that would say yes.
  bool has_frontend_kernels() const {
    std::unordered_map<int64_t, std::tuple<int64_t, int64_t, std::vector<float>>> tensors;
    int64_t offset = 0;
    if (collect_tensors_in_workspace_subtree(tensors, offset).is_bad()) return true;
    constexpr int64_t kNothingToDo = 2;  // the frontend's code for "just an address"
    for (const auto& [uid, tensor] : tensors) {
      if (std::get<0>(tensor) != kNothingToDo) return true;
    }
    return !varpack_template.replacement_slots.empty();
  }

 private:
  std::vector<fe::NumericalNote_t> refused_;
};

inline fe::DataType_t frontend_dtype(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Half: return fe::DataType_t::HALF;
    case c10::ScalarType::BFloat16: return fe::DataType_t::BFLOAT16;
    case c10::ScalarType::Float: return fe::DataType_t::FLOAT;
    case c10::ScalarType::Double: return fe::DataType_t::DOUBLE;
    case c10::ScalarType::Float8_e4m3fn: return fe::DataType_t::FP8_E4M3;
    case c10::ScalarType::Float8_e5m2: return fe::DataType_t::FP8_E5M2;
    case c10::ScalarType::Int: return fe::DataType_t::INT32;
    case c10::ScalarType::Long: return fe::DataType_t::INT64;
    default: return fe::DataType_t::NOT_SET;
  }
}

// An empty graph for `target`, whose tensors are of type `dtype` unless they say otherwise and
// which computes in float32. Nodes ask for the target when they are added, so it comes first.
inline std::shared_ptr<FrontendGraph> new_graph(const Target& target, c10::ScalarType dtype) {
  auto graph = std::make_shared<FrontendGraph>();
  graph->set_sm_version(target.sm_version());
  if (target.properties()) graph->set_device_properties(target.properties());
  graph->set_io_data_type(frontend_dtype(dtype))
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  return graph;
}

// Gives a frontend tensor the type, sizes and strides of `desc`.
inline fe::graph::Tensor_attributes& set_desc(fe::graph::Tensor_attributes& tensor,
                                              const TensorDesc& desc) {
  return tensor.set_data_type(frontend_dtype(desc.dtype))
      .set_dim({desc.sizes.begin(), desc.sizes.begin() + desc.rank})
      .set_stride({desc.strides.begin(), desc.strides.begin() + desc.rank});
}

// An input tensor of the graph.
inline std::shared_ptr<fe::graph::Tensor_attributes> input(FrontendGraph& graph, const char* name,
                                                           int64_t uid, const TensorDesc& desc) {
  auto attributes = fe::graph::Tensor_attributes().set_name(name).set_uid(uid);
  return graph.tensor(set_desc(attributes, desc));
}

// An input tensor that holds one whole number for each sequence, or one more.
inline std::shared_ptr<fe::graph::Tensor_attributes> index_input(FrontendGraph& graph,
                                                                 const char* name, int64_t uid,
                                                                 c10::ScalarType dtype,
                                                                 int64_t count) {
  return graph.tensor(fe::graph::Tensor_attributes()
                          .set_name(name)
                          .set_uid(uid)
                          .set_dim({count, 1, 1, 1})
                          .set_stride({1, 1, 1, 1})
                          .set_data_type(frontend_dtype(dtype)));
}

// A float that is read from host memory each time the plan is executed.
inline std::shared_ptr<fe::graph::Tensor_attributes> host_scalar(FrontendGraph& graph,
                                                                 const char* name, int64_t uid) {
  return graph.tensor(fe::graph::Tensor_attributes()
                          .set_name(name)
                          .set_uid(uid)
                          .set_dim({1, 1, 1, 1})
                          .set_stride({1, 1, 1, 1})
                          .set_data_type(fe::DataType_t::FLOAT)
                          .set_is_pass_by_value(true));
}

// Makes a node's result an output of the graph, laid out as `desc`.
inline void output(const std::shared_ptr<fe::graph::Tensor_attributes>& tensor, int64_t uid,
                   const TensorDesc& desc) {
  set_desc(tensor->set_output(true).set_uid(uid), desc);
}

}  // namespace cudnn_ops::graph
