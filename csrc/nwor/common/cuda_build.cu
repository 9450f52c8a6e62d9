// SPDX-License-Identifier: Apache-2.0
//
// The functions of dispatch.h that need CUDA's compiler and runtime.
#include "common/cuda_support.h"
#include "common/dispatch.h"

namespace nwor {

void check_device_sees(const char* op, const char* name, const void* memory) {
  void* seen = nullptr;
  const cudaError_t error =
      cudaHostGetDevicePointer(&seen, const_cast<void*>(memory), 0);
  if (error != cudaSuccess) {
    cudaGetLastError();  // or the next call of PyTorch's would report it
  }
  NWOR_CHECK(error == cudaSuccess && seen == memory, op, name,
             " is memory that the device does not see at its address; must be pinned");
}

#define NWOR_TEXT(...) #__VA_ARGS__
#define NWOR_VALUE(...) NWOR_TEXT(__VA_ARGS__)
const char* cuda_build() {
  return NWOR_VALUE(CUDART_VERSION) " " NWOR_VALUE(__CUDA_ARCH_LIST__) " " NWOR_VALUE(
      NWOR_PTX_ARCH);
}

}  // namespace nwor
