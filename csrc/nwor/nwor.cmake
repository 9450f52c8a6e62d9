# SPDX-License-Identifier: Apache-2.0
#
# The op library _nwor_C.so: libtorch's stable ABI, no Python symbols, one file for the
# CPU and, where nvcc is found, CUDA. No find_package(Torch): that wants the CUDA
# toolkit of the torch wheel and links far more than is used.
#
# CMakeLists.txt says how it is built by itself. In a fork of vLLM (tools/
# apply_to_vllm.py) vLLM's own CMakeLists.txt includes this file behind all of its
# targets: torch and whether there is CUDA are what it has found, the library goes
# beside the Python files, and a target has the name that vLLM's setup.py makes of the
# extension's.
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

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

include(${CMAKE_CURRENT_LIST_DIR}/torch.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/cuda.cmake)

set(NWOR_SOURCES
  audit_bindings.cpp
  audit_cpu.cpp
  builtins.cpp
  cow_bindings.cpp
  cow_cpu.cpp
  shadow_bindings.cpp
  shadow_cpu.cpp
  tensor_args.cpp
  torch_bindings.cpp)
list(TRANSFORM NWOR_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
add_library(_nwor_C SHARED ${NWOR_SOURCES})
set_target_properties(_nwor_C PROPERTIES PREFIX "")
if(NWOR_OUTPUT_DIR)
  # Relative to the source directory, wherever the build directory is.
  get_filename_component(NWOR_OUTPUT_DIR "${NWOR_OUTPUT_DIR}" ABSOLUTE)
  set_target_properties(_nwor_C PROPERTIES
    LIBRARY_OUTPUT_DIRECTORY "${NWOR_OUTPUT_DIR}")
endif()
# Paths of the build machine stay out of the library.
target_compile_options(_nwor_C PRIVATE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra
    -ffile-prefix-map=${CMAKE_SOURCE_DIR}/=
    -ffile-prefix-map=${TORCH_DIR}/=torch/>)
target_link_options(_nwor_C PRIVATE -Wl,--strip-debug -Wl,--gc-sections)
nwor_link_torch(_nwor_C)
nwor_add_cuda(_nwor_C)

if(DEFINED VLLM_TARGET_DEVICE)
  add_custom_target(v1.nwor._nwor_C DEPENDS _nwor_C)
  install(TARGETS _nwor_C
    LIBRARY DESTINATION vllm/v1/nwor COMPONENT v1.nwor._nwor_C)
endif()
