// SPDX-License-Identifier: Apache-2.0
//
// Launches through the CUDA driver. The runtime that is linked into this library is
// code that nobody else in the process runs: between two steps of a model it falls out
// of the processor's cache, and a launch through it waits for memory. The driver's own
// entry is the one that PyTorch's and Triton's launches end in. CUDA sources only.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>

#include "check.h"

namespace nwor {

constexpr int kMaxDevices = 64;

// What a launch needs to know of a device, asked for once.
inline int num_multiprocessors(const char* op, int device) {
  static std::atomic<int> known[kMaxDevices];
  NWOR_CHECK(device >= 0 && device < kMaxDevices, op, "cuda:", device,
             " is not supported; must be below ", kMaxDevices);
  int count = known[device].load(std::memory_order_relaxed);
  if (count == 0) {
    const cudaError_t error =
        cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    NWOR_CHECK(error == cudaSuccess, op, "cuda:", device,
               " cannot be asked for its size: ", cudaGetErrorString(error));
    known[device].store(count, std::memory_order_relaxed);
  }
  return count;
}

using LaunchFunction = decltype(&cuLaunchKernel);

// The driver's cuLaunchKernel, found at run time: this library loads without a driver.
inline LaunchFunction launch_function(const char* op) {
  static std::atomic<void*> known{nullptr};
  void* found = known.load(std::memory_order_relaxed);
  if (found == nullptr) {
    constexpr unsigned kSince = 12000;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error = cudaGetDriverEntryPointByVersion(
        "cuLaunchKernel", &found, kSince, cudaEnableDefault, &result);
    NWOR_CHECK(error == cudaSuccess && found != nullptr, op,
               "the driver has no cuLaunchKernel: ", cudaGetErrorString(error));
    known.store(found, std::memory_order_relaxed);
  }
  return reinterpret_cast<LaunchFunction>(found);
}

// A kernel without dynamic shared memory, launched in one dimension.
class DriverKernel {
 public:
  explicit DriverKernel(const void* symbol) : symbol_(symbol) {}

  // Does what the first launch would do besides.
  void load(const char* op, int device) {
    launch_function(op);
    function(op, device);
  }

  // Requires that `device` is the current one. `arguments` point to the kernel's.
  void launch(const char* op, int device, unsigned grid, unsigned block, void* stream,
              void** arguments) {
    const CUresult result =
        launch_function(op)(function(op, device), grid, 1, 1, block, 1, 1, 0,
                            static_cast<CUstream>(stream), arguments, nullptr);
    NWOR_CHECK(result == CUDA_SUCCESS, op, "the launch failed: CUDA driver error ",
               static_cast<int>(result));
  }

 private:
  // Loads the kernel at the first call for a device.
  CUfunction function(const char* op, int device) {
    CUfunction found = functions_[device].load(std::memory_order_relaxed);
    if (found == nullptr) {
      cudaError_t error = cudaSetDevice(device);
      if (error == cudaSuccess) {
        error = cudaGetFuncBySymbol(&found, symbol_);
      }
      NWOR_CHECK(error == cudaSuccess, op, "cuda:", device,
                 " cannot load the kernel: ", cudaGetErrorString(error));
      functions_[device].store(found, std::memory_order_relaxed);
    }
    return found;
  }

  const void* symbol_;
  std::atomic<CUfunction> functions_[kMaxDevices] = {};
};

}  // namespace nwor
