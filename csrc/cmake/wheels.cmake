# Finds what the build takes from pip wheels, and says what to install where one is missing.
#
# Sets TORCH_VERSION, TORCH_WITH_CUDA, TORCH_INCLUDE_DIRS, TORCH_LIBRARY_DIR,
# NVIDIA_INCLUDE_DIRS and CUDA_INCLUDE_DIR.

function(ask_python result code)
  execute_process(COMMAND ${Python_EXECUTABLE} -c "${code}" RESULT_VARIABLE status
                  OUTPUT_VARIABLE output ERROR_VARIABLE error OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT status EQUAL 0)
    string(REGEX MATCH "[^\n]*\n*$" error "${error}")
    message(FATAL_ERROR "${ARGN} (${Python_EXECUTABLE} says: ${error})")
  endif()
  set(${result} "${output}" PARENT_SCOPE)
endfunction()

# Asking torch by its files, not by find_package(Torch): that one wants a CUDA toolkit.
ask_python(torch_facts
           "import torch; print(torch.__version__, torch.version.cuda is not None, torch.__path__[0], torch.version.cuda or '13.0', sep=';')"
           "cudnn_ops is built against torch: `pip install torch==2.11.0` first")
list(GET torch_facts 0 TORCH_VERSION)
list(GET torch_facts 1 TORCH_WITH_CUDA)
list(GET torch_facts 2 torch_dir)
list(GET torch_facts 3 cuda_version)
set(TORCH_INCLUDE_DIRS ${torch_dir}/include ${torch_dir}/include/torch/csrc/api/include)
set(TORCH_LIBRARY_DIR ${torch_dir}/lib)

ask_python(site_dirs "import sys; print(*[p for p in sys.path if p], sep=';')" "python failed")
set(hints)
foreach(dir IN LISTS site_dirs)
  list(APPEND hints ${dir}/include ${dir}/nvidia/cudnn/include ${dir}/nvidia/cu13/include
       ${dir}/nvidia/cu13/include/cccl)
endforeach()
foreach(root $ENV{CUDA_HOME} /usr/local/cuda)
  list(APPEND hints ${root}/include ${root}/include/cccl)
endforeach()

# header, variable, wheel; NVIDIA's wheels have the version of the CUDA that torch was built with
function(find_header header variable wheel)
  find_path(${variable} ${header} PATHS ${hints} NO_DEFAULT_PATH)
  if(NOT ${variable})
    message(FATAL_ERROR "${header} was not found: `pip install ${wheel}`")
  endif()
endfunction()
find_header(cudnn_frontend.h FRONTEND_INCLUDE_DIR "--no-deps nvidia-cudnn-frontend==1.32.0")
find_header(cudnn_graph.h CUDNN_INCLUDE_DIR "nvidia-cudnn-cu13==9.19.0.56")
find_header(cuda_runtime_api.h CUDA_INCLUDE_DIR "nvidia-cuda-runtime==${cuda_version}.*")
find_header(crt/host_defines.h CRT_INCLUDE_DIR "nvidia-cuda-crt==${cuda_version}.*")
find_header(nv/target CCCL_INCLUDE_DIR "nvidia-cuda-cccl==${cuda_version}.*")
set(NVIDIA_INCLUDE_DIRS ${FRONTEND_INCLUDE_DIR} ${CUDNN_INCLUDE_DIR} ${CUDA_INCLUDE_DIR}
    ${CRT_INCLUDE_DIR} ${CCCL_INCLUDE_DIR})
list(REMOVE_DUPLICATES NVIDIA_INCLUDE_DIRS)
