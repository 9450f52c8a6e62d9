// SPDX-License-Identifier: Apache-2.0
//
// Launches through the CUDA driver. The CUDA runtime that is linked into this library
// is used by nothing else in the process, so it is cold in the CPU's caches in each
// step, and a launch through it waits for memory. The driver's own entry point is
// shared with the launches of PyTorch and Triton. CUDA sources only.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>

#include "common/check.h"

namespace nwor {

constexpr int kMaxDevices = 64;

inline void check_device(const char* op, int device) {
  NWOR_CHECK(device >= 0 && device < kMaxDevices, op, "cuda:", device,
             " is not supported; must be below ", kMaxDevices);
}

// Properties of a device that a launch needs, queried once.
template <cudaDeviceAttr kAttribute>
int device_attribute(const char* op, int device) {
  static std::atomic<int> known[kMaxDevices];
  check_device(op, device);
  int found = known[device].load(std::memory_order_relaxed);
  if (found == 0) {
    const cudaError_t error = cudaDeviceGetAttribute(&found, kAttribute, device);
    NWOR_CHECK(error == cudaSuccess, op, "cuda:", device,
               " cannot be asked for its properties: ", cudaGetErrorString(error));
    known[device].store(found, std::memory_order_relaxed);
  }
  return found;
}

inline int num_multiprocessors(const char* op, int device) {
  return device_attribute<cudaDevAttrMultiProcessorCount>(op, device);
}

// A function of the driver, found at run time: this library loads without a driver.
// known: of this function alone.
template <typename Function>
Function* driver_function(const char* op, const char* name, std::atomic<void*>& known) {
  void* found = known.load(std::memory_order_relaxed);
  if (found == nullptr) {
    constexpr unsigned kSince = 12000;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error = cudaGetDriverEntryPointByVersion(
        name, &found, kSince, cudaEnableDefault, &result);
    NWOR_CHECK(error == cudaSuccess && found != nullptr, op, "the driver has no ", name,
               ": ", cudaGetErrorString(error));
    known.store(found, std::memory_order_relaxed);
  }
  return reinterpret_cast<Function*>(found);
}

inline auto launch_function(const char* op) {
  static std::atomic<void*> known{nullptr};
  return driver_function<decltype(cuLaunchKernelEx)>(op, "cuLaunchKernelEx", known);
}

// Whether a device that has early launches runs code with wait_for_stream in it.
constexpr bool kCanWaitForStream = [] {
  for (const int architecture : {__CUDA_ARCH_LIST__}) {
    if (architecture >= 900) {
      return true;
    }
  }
  return false;
}();

// Every kernel begins with this. One that is launched early, while earlier work in its
// stream ends, waits for that here. is_followed: the next launch is one of ours, and
// may be set up as soon as all blocks of this one run. What is not ours comes after the
// whole grid, as after any kernel, also where it is launched early and does not wait.
//
// To trigger before waiting is safe. The trigger only allows the next grid to start:
// this one's blocks run already, and cannot be kept off the device by it. What the next
// grid may read is decided by its own wait, which returns when this grid has ended and
// its writes are visible; and this grid does not end before its wait has. So the order
// is that of the stream, over any number of early launches, as long as what is not ours
// does the same: a kernel in front that is launched early and never waits ends before
// what it did not wait for.
__device__ inline void wait_for_stream(bool is_followed = false) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (is_followed) {
    cudaTriggerProgrammaticLaunchCompletion();
  }
  cudaGridDependencySynchronize();
#endif
}

// A kernel without dynamic shared memory, launched in one dimension.
class DriverKernel {
 public:
  explicit DriverKernel(const void* symbol) : symbol_(symbol) {}

  // One-time initialization, so that the first launch does not do it.
  void load(const char* op, int device) {
    launch_function(op);
    function(op, device);
  }

  // Requires that `device` is the current one. `arguments` point to the kernel's.
  // is_early: while earlier work in the stream ends; not where an event is awaited.
  void launch(const char* op, int device, unsigned grid, unsigned block, void* stream,
              void** arguments, bool is_early = true) {
    CUlaunchAttribute attribute{};
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config{};
    config.gridDimX = grid;
    config.gridDimY = config.gridDimZ = 1;
    config.blockDimX = block;
    config.blockDimY = config.blockDimZ = 1;
    config.hStream = static_cast<CUstream>(stream);
    config.attrs = &attribute;
    const int major = device_attribute<cudaDevAttrComputeCapabilityMajor>(op, device);
    config.numAttrs = is_early && kCanWaitForStream && major >= 9 ? 1 : 0;
    check(op, launch_function(op)(&config, function(op, device), arguments, nullptr));
  }

 private:
  static void check(const char* op, CUresult result) {
    NWOR_CHECK(result == CUDA_SUCCESS, op, "the launch failed: CUDA driver error ",
               static_cast<int>(result));
  }

  // Loads the kernel at the first call for a device.
  CUfunction function(const char* op, int device) {
    check_device(op, device);
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
