# What a program without Python needs: the rules that Python would read from a file are in the
# library, and a package for find_package(cudnn_ops) lies beside it, in the Python package's
# share/cmake (cudnn_ops.cmake_prefix_path).

# --- the known errors of cuDNN ---------------------------------------------------------
set(known_bad_files ${PROJECT_SOURCE_DIR}/cudnn_ops/support/known_bad.py
                    ${PROJECT_SOURCE_DIR}/cudnn_ops/support/known_bad.json)
add_custom_command(
  OUTPUT known_bad_rules.h
  COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/csrc/cmake/embed_known_bad.py
          ${PROJECT_SOURCE_DIR}/cudnn_ops/support known_bad_rules.h
  DEPENDS csrc/cmake/embed_known_bad.py ${known_bad_files} VERBATIM)
target_sources(cudnn_ops PRIVATE ${PROJECT_BINARY_DIR}/known_bad_rules.h)

# --- find_package(cudnn_ops) -----------------------------------------------------------
include(CMakePackageConfigHelpers)
file(STRINGS cudnn_ops/__init__.py version_line REGEX "^__version__ = ")
string(REGEX MATCH "[0-9.]+" package_version "${version_line}")
set(package_dir ${CUDNN_OPS_OUTPUT_DIR}/share/cmake/cudnn_ops)
configure_file(csrc/cmake/cudnn_opsConfig.cmake.in ${package_dir}/cudnn_opsConfig.cmake @ONLY)
write_basic_package_version_file(${package_dir}/cudnn_opsConfigVersion.cmake
                                 VERSION ${package_version} COMPATIBILITY SameMinorVersion)
install(DIRECTORY ${package_dir} DESTINATION share/cmake COMPONENT wheel)
