// cudnn_ops._C: versions, cache statistics, the description of a GPU, and where warnings go. No
// operator runs through it.

#include "api.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;
namespace api = cudnn_ops::api;

namespace {

// Operators run without the GIL, and in threads that Python knows nothing of.
void warn_in_python(const char* message) {
  if (Py_IsInitialized() == 0) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_WarnEx(PyExc_UserWarning, message, /*stack_level=*/1) != 0) {
    throw py::error_already_set();
  }
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  api::set_warner(warn_in_python);
  m.def("versions", [] {
    const auto versions = api::versions();
    py::dict result;
    result["torch"] = versions.torch;
    result["cudnn_headers"] = versions.cudnn_headers;
    result["frontend_headers"] = versions.frontend_headers;
    result["with_cuda"] = versions.with_cuda;
    return result;
  });
  m.def("cache_info", [] {
    const auto info = api::cache_info();
    return py::make_tuple(info.hits, info.builds, info.loads, info.evictions, info.size,
                          info.limit);
  });
  m.def("cache_clear", &api::cache_clear, py::call_guard<py::gil_scoped_release>());
  m.def("set_cache_limit", &api::set_cache_limit, py::arg("limit"),
        py::call_guard<py::gil_scoped_release>());
  m.def("start_recording", &api::start_recording);
  m.def("stop_recording", &api::stop_recording, py::arg("recording"));
  m.def("describe_plan", &api::describe_plan, py::arg("words"));
  m.def("make_plan", &api::make_plan, py::arg("words"), py::arg("device"),
        py::call_guard<py::gil_scoped_release>());
  m.def("policy", &api::policy);
  m.def("set_policy", &api::set_policy, py::arg("policy"));
  m.def("promote_after", &api::promote_after);
  m.def("set_promote_after", &api::set_promote_after, py::arg("calls"));
  m.def("autotune", &api::autotune);
  m.def("set_autotune", &api::set_autotune, py::arg("autotune"));
  m.def("take_measurements", &api::take_measurements);
  m.def("set_engine_table", &api::set_engine_table, py::arg("sm_version"), py::arg("cudnn_version"),
        py::arg("engines"));
  m.def("set_norm_table", &api::set_norm_table, py::arg("sm_version"), py::arg("cudnn_version"),
        py::arg("choices"));
  m.def("set_known_bad", [](const std::vector<py::dict>& rules) {
    std::vector<api::KnownBad> all;
    for (const auto& rule : rules) {
      using Range = std::pair<int64_t, int64_t>;
      all.push_back({rule["id"].cast<std::string>(), rule["plan"].cast<std::string>(),
                     rule["cudnn"].cast<Range>(), rule["sm"].cast<Range>(),
                     rule["when"].cast<decltype(api::KnownBad::when)>(),
                     rule["reason"].cast<std::string>()});
    }
    api::set_known_bad(all);
  });
  m.def("known_bad", &api::known_bad, py::arg("words"), py::arg("sm_version"),
        py::arg("cudnn_version"));
  m.def("set_context_parallel", &api::set_context_parallel, py::arg("active"));
  m.def("set_store", &api::set_store, py::arg("folder"), py::arg("limit"));
  m.def("store_info", [] {
    const auto info = api::store_info();
    return py::make_tuple(info.folder, info.refusal, info.files, info.bytes, info.limit);
  });
  m.def("store_clear", &api::store_clear);
  m.def("set_cudnn_fallback_path", &api::set_cudnn_fallback_path, py::arg("path"));
  m.def("cudnn_version", &api::cudnn_version);
  m.def("cudnn_path", &api::cudnn_path);
  m.def("describe_device", &api::describe_device, py::arg("index"));
}
