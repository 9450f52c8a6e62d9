# SPDX-License-Identifier: Apache-2.0
#
# nwor_add_cuda(target): adds the CUDA sources if NWOR_CUDA is ON. The CUDA runtime is
# linked statically, so that the same library loads on a machine without CUDA.

set(NWOR_CMAKE_DIR ${CMAKE_CURRENT_LIST_DIR})
option(NWOR_CUDA "Whether there is CUDA code: needs nvcc on PATH, or in CUDACXX" OFF)
# At least 80: the kernels use __reduce_add_sync. Code for 80 runs on 86 and 89, too, that
# for 100 on 103.
set(NWOR_CUDA_ARCHS "80;90;100;120" CACHE STRING "CUDA compute capabilities")

if(NWOR_CUDA)
  foreach(arch IN LISTS NWOR_CUDA_ARCHS)
    if(NOT arch MATCHES "^([89]|[1-9][0-9])[0-9]$")
      message(FATAL_ERROR "NWOR_CUDA_ARCHS has '${arch}'; must be compute capabilities "
        "of 80 or more: the kernels use __reduce_add_sync, which GPUs have since sm_80.")
    endif()
  endforeach()
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR "NWOR_CUDA is ON and nvcc was not found; put it on PATH, set "
      "CUDACXX, or give -DNWOR_CUDA=OFF.")
  endif()
  # Leave out what this nvcc does not know yet, or no longer.
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-arch
    OUTPUT_VARIABLE known_archs)
  set(CMAKE_CUDA_ARCHITECTURES "")
  set(NWOR_PTX_ARCH "")
  foreach(arch IN LISTS NWOR_CUDA_ARCHS)
    if(known_archs MATCHES "compute_${arch}[^0-9a-z]")
      list(APPEND CMAKE_CUDA_ARCHITECTURES ${arch}-real)
      if(NOT NWOR_PTX_ARCH OR NWOR_PTX_ARCH LESS 90)
        set(NWOR_PTX_ARCH ${arch})
      endif()
    else()
      message(WARNING "NWOR_CUDA_ARCHS: this nvcc cannot build for ${arch}; left out.")
    endif()
  endforeach()
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    message(FATAL_ERROR "NWOR_CUDA_ARCHS is '${NWOR_CUDA_ARCHS}'; this nvcc can build "
      "for none of them, it knows: ${known_archs}")
  endif()
  # Other GPUs, later ones too, compile PTX: that of the oldest architecture whose code
  # is like that of the newest (launches that begin early, from 90 on).
  list(APPEND CMAKE_CUDA_ARCHITECTURES ${NWOR_PTX_ARCH}-virtual)
  if(NOT CMAKE_CUDA_COMPILER_LOADED)  # vLLM's build has, where it includes this
    enable_language(CUDA)
  endif()
  set(CMAKE_CUDA_STANDARD 17)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
endif()
message(STATUS "nwor: CUDA ${NWOR_CUDA} ${CMAKE_CUDA_ARCHITECTURES}")

function(nwor_add_cuda target)
  if(NOT NWOR_CUDA)
    return()
  endif()
  set(sources
    common/cuda_build.cu
    transaction/cow_cuda.cu
    transaction/shadow_cuda.cu
    audit/audit_cuda.cu)
  list(TRANSFORM sources PREPEND ${NWOR_SOURCE_DIR}/)
  target_sources(${target} PRIVATE ${sources})
  # USE_CUDA: PyTorch's headers then declare the current stream.
  target_compile_definitions(${target} PRIVATE NWOR_CUDA USE_CUDA
    NWOR_PTX_ARCH=${NWOR_PTX_ARCH}0)
  set_target_properties(${target} PROPERTIES
    CUDA_RUNTIME_LIBRARY Static CUDA_VISIBILITY_PRESET hidden)
  # The CUDA runtime's threads and dlopen, with versions that older glibcs have, too:
  # found before libc.
  execute_process(
    COMMAND ${Python_EXECUTABLE} ${NWOR_CMAKE_DIR}/older_glibc.py
      ${CMAKE_CXX_COMPILER} ${CMAKE_CURRENT_BINARY_DIR}/older_glibc
    OUTPUT_VARIABLE older_glibc COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]+" older_glibc "${older_glibc}")
  target_link_libraries(${target} PRIVATE ${older_glibc})
endfunction()
