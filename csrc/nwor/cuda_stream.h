// SPDX-License-Identifier: Apache-2.0
//
// PyTorch's current CUDA stream, for builds with CUDA.
#pragma once

#include <cstdint>

#include "check.h"

// As PyTorch declares it where it has CUDA. Weak, so that this library also loads where
// PyTorch has none.
extern "C" __attribute__((weak)) int32_t
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace nwor {

// A cudaStream_t. Refuses a PyTorch that has none.
inline void* current_cuda_stream(const char* op, int device) {
  void* stream = nullptr;
  NWOR_CHECK(aoti_torch_get_current_cuda_stream != nullptr &&
                 aoti_torch_get_current_cuda_stream(device, &stream) == 0,
             op, "this PyTorch has no current CUDA stream; must be a ",
             "build of PyTorch with CUDA");
  return stream;
}

}  // namespace nwor
