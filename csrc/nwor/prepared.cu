// SPDX-License-Identifier: Apache-2.0
#include "prepared.h"

#include <exception>
#include <string>

#include "cuda_support.h"

extern "C" __attribute__((weak)) int32_t
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace nwor {
namespace {

// Runs launch(stream) and turns what it throws into a text.
template <typename Launch>
const char* run(const char* op, int32_t device, const Launch& launch) {
  thread_local std::string text;
  try {
    int current = -1;
    NWOR_CHECK(cudaGetDevice(&current) == cudaSuccess && current == device, op,
               "the current device is ", current, "; must be ", device);
    void* stream = nullptr;
    NWOR_CHECK(aoti_torch_get_current_cuda_stream != nullptr &&
                   aoti_torch_get_current_cuda_stream(device, &stream) == 0,
               op, "this PyTorch has no current CUDA stream");
    launch(stream);
    return nullptr;
  } catch (const std::exception& error) {
    text = error.what();
    return text.c_str();
  }
}

}  // namespace
}  // namespace nwor

void nwor_prepared_sizes(int64_t* sizes) {
  sizes[0] = sizeof(nwor::LogArgs);
  sizes[1] = sizeof(nwor::RestoreArgs);
}

const char* nwor_prepared_log(const nwor::LogArgs* args, int32_t device) {
  return nwor::run("log_cache_slots", device, [&](void* stream) {
    nwor::log_cache_slots_cuda(*args, device, stream);
  });
}

const char* nwor_prepared_restore(const nwor::RestoreArgs* args, int32_t device) {
  return nwor::run("restore_rejected_drafts", device, [&](void* stream) {
    nwor::restore_rejected_drafts_cuda(*args, device, stream);
  });
}

const char* nwor_prepared_publish(void* to, const void* from, int64_t num_bytes,
                                  int32_t device) {
  constexpr const char* kPublish = "publish";
  return nwor::run(kPublish, device, [&](void* stream) {
    const cudaError_t error = cudaMemcpyAsync(
        to, from, num_bytes, cudaMemcpyDeviceToHost, static_cast<cudaStream_t>(stream));
    NWOR_CHECK(error == cudaSuccess, kPublish,
               "the copy failed: ", cudaGetErrorString(error));
  });
}
