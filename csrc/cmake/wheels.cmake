# Finds what the build takes from pip wheels, and says what to install where one is missing.
#
# Sets TORCH_VERSION, TORCH_WITH_CUDA, TORCH_INCLUDE_DIRS, TORCH_LIBRARY_DIR,
# NVIDIA_INCLUDE_DIRS, CUDA_INCLUDE_DIR and PYTHON_INCLUDE_DIR.

function(ask_python result code)
  execute_process(COMMAND ${Python_EXECUTABLE} -c "${code}" RESULT_VARIABLE status
                  OUTPUT_VARIABLE output ERROR_VARIABLE error OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT status EQUAL 0)
    string(REGEX MATCH "[^\n]*\n*$" error "${error}")
    message(FATAL_ERROR "${ARGN} (${Python_EXECUTABLE} says: ${error})")
  endif()
  set(${result} "${output}" PARENT_SCOPE)
endfunction()

# Torch is known by its files: find_package(Torch) wants a CUDA toolkit, and another machine's torch
# cannot be imported.
set(CUDNN_OPS_SITE_PACKAGES "" CACHE PATH
    "Unpacked wheels of the machine that is built for, where that is not Python's; torch at least")
if(CUDNN_OPS_SITE_PACKAGES)
  set(torch_dir ${CUDNN_OPS_SITE_PACKAGES}/torch)
else()
  ask_python(torch_dir
             "import importlib.util as u; torch = u.find_spec('torch') or exit('it has no torch'); print(*torch.submodule_search_locations)"
             "cudnn_ops is built against torch: `pip install torch==2.11.0` first")
endif()
file(STRINGS ${torch_dir}/version.py torch_version REGEX "^__version__ = ")
string(REGEX REPLACE ".*'(.*)'.*" "\\1" TORCH_VERSION "${torch_version}")
# cuda: Optional[str] = '13.0'; None in a torch without CUDA
file(STRINGS ${torch_dir}/version.py cuda_version REGEX "^cuda.*'")
string(REGEX REPLACE ".*'(.*)'.*" "\\1" cuda_version "${cuda_version}")
set(TORCH_WITH_CUDA TRUE)
if(NOT cuda_version)
  set(TORCH_WITH_CUDA FALSE)
  set(cuda_version 13.0)
endif()
set(TORCH_INCLUDE_DIRS ${torch_dir}/include ${torch_dir}/include/torch/csrc/api/include)
set(TORCH_LIBRARY_DIR ${torch_dir}/lib)

ask_python(PYTHON_INCLUDE_DIR "import sysconfig; print(sysconfig.get_path('include'))"
           "python failed")
ask_python(site_dirs "import sys; print(*[p for p in sys.path if p], sep=';')" "python failed")
# NVIDIA's headers are the same for every processor: what the folder of wheels lacks is Python's.
set(hints)
foreach(dir IN LISTS CUDNN_OPS_SITE_PACKAGES site_dirs)
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
