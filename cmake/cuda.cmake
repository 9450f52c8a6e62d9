# SPDX-License-Identifier: Apache-2.0
#
# nwor_add_cuda(target): the CUDA sources, if NWOR_CUDA says so.

set(NWOR_CUDA AUTO CACHE STRING "AUTO (by nvcc), ON or OFF")
set_property(CACHE NWOR_CUDA PROPERTY STRINGS AUTO ON OFF)
set(NWOR_CUDA_ARCHS "80;90;100;120" CACHE STRING "CUDA compute capabilities")

if(NOT NWOR_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "NWOR_CUDA is '${NWOR_CUDA}'; must be AUTO, ON or OFF.")
endif()
if(NOT NWOR_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER AND NWOR_CUDA STREQUAL "ON")
    message(FATAL_ERROR "NWOR_CUDA is ON and nvcc was not found; put it on "
      "PATH, set CUDACXX, or give -DNWOR_CUDA=OFF.")
  endif()
endif()

function(nwor_add_cuda target)
endfunction()
