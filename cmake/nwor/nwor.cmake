# SPDX-License-Identifier: Apache-2.0
#
# Builds csrc/nwor into the Python module _nwor_C.so, with Python's limited API and
# libtorch's stable ABI: one file for the CPU and, with NWOR_CUDA, for CUDA.
# find_package(Torch) is not used: it requires the CUDA toolkit of the torch wheel, and
# links far more than is needed.
#
# CMakeLists.txt includes this file for a build of its own. In a fork of vLLM (tools/
# apply_to_vllm.py) vLLM's CMakeLists.txt includes it after all of its own targets. Then
# Python, torch and CUDA are those that vLLM found, the library goes into vllm/v1/nwor,
# and the target has the name that vLLM's setup.py derives from the extension's name.
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)

if(DEFINED VLLM_TARGET_DEVICE)
  set(NWOR_OUTPUT_DIR ${CMAKE_SOURCE_DIR}/vllm/v1/nwor)
  if(NOT TORCH_DIR)
    set(TORCH_DIR ${TORCH_INSTALL_PREFIX})
  endif()
  if(VLLM_GPU_LANG STREQUAL "CUDA")
    set(NWOR_CUDA ON)
  else()
    set(NWOR_CUDA OFF)
  endif()
endif()
if(NOT EXISTS "${TORCH_DIR}/include/torch/csrc/stable/library.h")
  message(FATAL_ERROR
    "TORCH_DIR is '${TORCH_DIR}'; must be the directory of an installed torch "
    "package, 2.11 or later. Give -DTORCH_DIR=<site-packages>/torch.")
endif()

include(${CMAKE_CURRENT_LIST_DIR}/cuda.cmake)

set(NWOR_SOURCE_DIR ${CMAKE_SOURCE_DIR}/csrc/nwor)
set(NWOR_SOURCES
  common/older_runtime.cpp
  common/tensor_args.cpp
  transaction/cow_cpu.cpp
  transaction/cow_ops.cpp
  transaction/shadow_cpu.cpp
  transaction/shadow_ops.cpp
  audit/audit_cpu.cpp
  audit/audit_ops.cpp
  bindings/python_bindings.cpp
  bindings/torch_bindings.cpp)
list(TRANSFORM NWOR_SOURCES PREPEND ${NWOR_SOURCE_DIR}/)
Python_add_library(_nwor_C MODULE ${NWOR_SOURCES})
if(NWOR_OUTPUT_DIR)
  # Relative to the source directory, wherever the build directory is.
  get_filename_component(NWOR_OUTPUT_DIR "${NWOR_OUTPUT_DIR}" ABSOLUTE)
  set_target_properties(_nwor_C PROPERTIES
    LIBRARY_OUTPUT_DIRECTORY "${NWOR_OUTPUT_DIR}")
endif()
target_include_directories(_nwor_C PRIVATE ${NWOR_SOURCE_DIR})
target_include_directories(_nwor_C SYSTEM PRIVATE ${TORCH_DIR}/include)
target_compile_definitions(_nwor_C PRIVATE TORCH_TARGET_VERSION=0x020B000000000000ULL)
# Paths of the build machine stay out of the library.
target_compile_options(_nwor_C PRIVATE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra
    -ffile-prefix-map=${CMAKE_SOURCE_DIR}/=
    -ffile-prefix-map=${TORCH_DIR}/=torch/>)
# The two libraries of torch whose symbols are used: they are loaded when Python loads
# this one, so no run path is recorded. libtorch.so itself has none of them, but where
# it is the CUDA build it brings in the library that has the current stream.
target_link_options(_nwor_C PRIVATE
  -Wl,--strip-debug -Wl,--gc-sections -Wl,--no-as-needed)
target_link_libraries(_nwor_C PRIVATE
  ${TORCH_DIR}/lib/libtorch.so ${TORCH_DIR}/lib/libtorch_cpu.so)
set_target_properties(_nwor_C PROPERTIES SKIP_BUILD_RPATH ON)
nwor_add_cuda(_nwor_C)

if(DEFINED VLLM_TARGET_DEVICE)
  add_custom_target(v1.nwor._nwor_C DEPENDS _nwor_C)
  install(TARGETS _nwor_C
    LIBRARY DESTINATION vllm/v1/nwor COMPONENT v1.nwor._nwor_C)
endif()
