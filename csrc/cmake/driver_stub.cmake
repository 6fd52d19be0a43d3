# stub/libcuda.so.1: a CUDA driver that says "no device". cuDNN compiles attention and norm
# kernels only where it can open a driver, although compiling them needs none.
#
# Every entry point that cuda.h declares returns CUDA_ERROR_NO_DEVICE, but for those that
# csrc/stub/libcuda.c defines; the list comes from the header, so it is complete.
file(READ ${CUDA_INCLUDE_DIR}/cuda.h cuda_header)
file(READ csrc/stub/libcuda.c stub_source)
string(REGEX MATCHALL "cu[A-Z][A-Za-z0-9]+(_v[0-9]+)?" names "${cuda_header}")
list(REMOVE_DUPLICATES names)
set(entry_points "")
foreach(name IN LISTS names)
  string(REGEX MATCH "[ (]${name}[()]" defined "${stub_source}")
  if(NOT defined)
    string(APPEND entry_points "STUB(${name})\n")
  endif()
endforeach()
file(CONFIGURE OUTPUT stub/entry_points.inc CONTENT "${entry_points}" @ONLY)

add_library(cuda_stub SHARED csrc/stub/libcuda.c)
target_include_directories(cuda_stub PRIVATE ${PROJECT_BINARY_DIR}/stub)
target_link_libraries(cuda_stub PRIVATE old_glibc)
set_target_properties(cuda_stub PROPERTIES
  OUTPUT_NAME cuda SUFFIX ".so.1" NO_SONAME ON C_VISIBILITY_PRESET default
  LINK_OPTIONS "-Wl,-soname,libcuda.so.1"
  LIBRARY_OUTPUT_DIRECTORY ${CUDNN_OPS_OUTPUT_DIR}/stub)
