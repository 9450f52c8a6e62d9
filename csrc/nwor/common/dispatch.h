// SPDX-License-Identifier: Apache-2.0
//
// From checked arguments to the launcher of their device. On CUDA: with the
// device current and on PyTorch's current stream.
#pragma once

#include <optional>
#include <type_traits>

#include "common/check.h"
#include "common/tensor_args.h"

#ifdef NWOR_CUDA
#include <torch/csrc/stable/accelerator.h>

// As PyTorch declares it where it has CUDA. Weak, so that this library also loads where
// PyTorch has none.
extern "C" __attribute__((weak)) int32_t
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
#endif

namespace nwor {

#ifdef NWOR_CUDA
// Refuses host memory that a kernel could not write to; `name`: of the argument.
void check_device_sees(const char* op, const char* name, const void* memory);
// What this was compiled with: CUDA's version as it encodes it, and the compute
// capabilities of machine code and PTX, e.g. "13000 800,900 900".
const char* cuda_build();
#endif

// Says that the device of the tensors is the current one, while it lives: it need not
// be made that.
class CurrentDevice {
 public:
  CurrentDevice() { is_known() = true; }
  ~CurrentDevice() { is_known() = false; }
  CurrentDevice(const CurrentDevice&) = delete;
  static bool& is_known() {
    thread_local bool known = false;
    return known;
  }
};

template <typename Args>
using CudaLauncher = void (*)(const Args& args, int device, void* stream);

// on_cuda is not used, and null, in a build without CUDA.
template <typename Args>
void dispatch(const TensorArgs& tensors, const Args& args, void (*on_cpu)(const Args&),
              [[maybe_unused]] std::common_type_t<CudaLauncher<Args>> on_cuda) {
  if (!tensors.on_cuda()) {
    on_cpu(args);
    return;
  }
#ifdef NWOR_CUDA
  const int device = tensors.device_index();
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (!CurrentDevice::is_known()) {
    guard.emplace(device);
  }
  void* stream = nullptr;
  NWOR_CHECK(aoti_torch_get_current_cuda_stream != nullptr &&
                 aoti_torch_get_current_cuda_stream(device, &stream) == 0,
             tensors.op(), "this PyTorch has no current CUDA stream; must be a ",
             "build of PyTorch with CUDA");
  on_cuda(args, device, stream);
#else
  refuse(tensors.op(), "tensors are on CUDA; this library was built for the ",
         "CPU only, build it again where nvcc is installed");
#endif
}

}  // namespace nwor

#ifdef NWOR_CUDA
#define NWOR_DISPATCH(tensors, args, launcher) \
  ::nwor::dispatch(tensors, args, launcher##_cpu, launcher##_cuda)
#else
#define NWOR_DISPATCH(tensors, args, launcher) \
  ::nwor::dispatch(tensors, args, launcher##_cpu, nullptr)
#endif
