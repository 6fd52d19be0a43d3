// cudnn_ops._C: versions, cache statistics and the description of a GPU. No operator runs
// through it.

#include "api.h"

#include <pybind11/pybind11.h>

namespace py = pybind11;
namespace api = cudnn_ops::api;

PYBIND11_MODULE(_C, m) {
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
    return py::make_tuple(info.hits, info.builds, info.evictions, info.size, info.limit);
  });
  m.def("cache_clear", &api::cache_clear, py::call_guard<py::gil_scoped_release>());
  m.def("set_cache_limit", &api::set_cache_limit, py::arg("limit"),
        py::call_guard<py::gil_scoped_release>());
  m.def("set_cudnn_fallback_path", &api::set_cudnn_fallback_path, py::arg("path"));
  m.def("cudnn_version", &api::cudnn_version);
  m.def("cudnn_path", &api::cudnn_path);
  m.def("describe_device", &api::describe_device, py::arg("index"));
}
