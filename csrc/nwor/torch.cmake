# SPDX-License-Identifier: Apache-2.0
#
# TORCH_DIR, and nwor_link_torch(target): headers, and the two libraries whose
# symbols are used. They are already loaded when Python loads the target, so no
# run path is recorded.

if(NOT TORCH_DIR)
  # Without importing torch: that takes seconds.
  find_package(Python3 COMPONENTS Interpreter REQUIRED)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -c
      "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
if(NOT EXISTS "${TORCH_DIR}/include/torch/csrc/stable/library.h")
  message(FATAL_ERROR
    "TORCH_DIR is '${TORCH_DIR}'; must be the directory of an installed torch "
    "package, 2.11 or later. Give -DTORCH_DIR=<site-packages>/torch.")
endif()

function(nwor_link_torch target)
  target_include_directories(${target} SYSTEM PRIVATE ${TORCH_DIR}/include)
  target_compile_definitions(${target} PRIVATE
    TORCH_TARGET_VERSION=0x020B000000000000ULL)
  # libtorch.so itself has no symbols of ours, but where it is the CUDA build it
  # brings in the library that has the current stream.
  target_link_options(${target} PRIVATE -Wl,--no-as-needed)
  target_link_libraries(${target} PRIVATE
    ${TORCH_DIR}/lib/libtorch.so ${TORCH_DIR}/lib/libtorch_cpu.so)
  set_target_properties(${target} PROPERTIES SKIP_BUILD_RPATH ON)
endfunction()
