// The one libcudnn of this process: the copy that torch has loaded, or, where torch has
// none (a CPU-only build), the one that the dynamic loader or the nvidia-cudnn wheel offers.
#pragma once

#include <cudnn_graph.h>

#include <cstddef>
#include <string>

namespace cudnn_ops::graph {

// The backend entry points that a plan's execution needs, resolved once so that the call
// path pays no symbol lookup.
struct CudnnLibrary {
  size_t version;  // as cudnnGetVersion() gives it: 91900 is 9.19.0
  std::string path;
  decltype(&cudnnBackendCreateDescriptor) create_descriptor;
  decltype(&cudnnBackendDestroyDescriptor) destroy_descriptor;
  decltype(&cudnnBackendSetAttribute) set_attribute;
  decltype(&cudnnBackendFinalize) finalize;
  decltype(&cudnnBackendExecute) execute;
  decltype(&cudnnGetErrorString) error_string;
  decltype(&cudnnGetLastErrorString) last_error_string;
};

// Loads libcudnn at the first call, from any thread. Throws CudnnError when there is none;
// the next call tries again.
const CudnnLibrary& cudnn();

// Has a thread load libcudnn, and the libraries that it loads itself for the first graph: tens of
// milliseconds of that graph's call otherwise. Only the first call does anything.
void load_ahead();

// 91900 as "9.19.0".
std::string version_name(size_t version);

// A file to try when the process has no libcudnn and the dynamic loader finds none.
// Only before the first successful cudnn().
void set_fallback_path(const std::string& path);

}  // namespace cudnn_ops::graph
