// SPDX-License-Identifier: Apache-2.0
//
// Prepared launches: log_cache_slots and restore_rejected_drafts for a caller that
// keeps the arguments of a launch in memory and changes only what a step changes. A
// call is one C function instead of a dispatch through PyTorch, whose code is not in
// the processor's cache when a step of a model has run since the last one.
//
// C linkage, plain structs, CUDA only. vllm/v1/nwor/prepared.py mirrors the structs;
// nwor_prepared_sizes lets it check that both sides mean the same ones. It sends the
// arguments through the op once, which checks them all; these functions check nothing
// but the device.
#pragma once

#include "launch.h"

#define NWOR_EXPORT extern "C" __attribute__((visibility("default")))

// sizes[0], sizes[1]: of LogArgs and RestoreArgs.
NWOR_EXPORT void nwor_prepared_sizes(int64_t* sizes);

// Each enqueues one launch on PyTorch's current stream of `device`, which must be the
// current device. Returns nullptr, or a text that stays valid until the thread's next
// call.
NWOR_EXPORT const char* nwor_prepared_log(const nwor::LogArgs* args, int32_t device);
NWOR_EXPORT const char* nwor_prepared_restore(const nwor::RestoreArgs* args,
                                              int32_t device);

// The same, for a copy of num_bytes from the device to pinned memory.
NWOR_EXPORT const char* nwor_prepared_publish(void* to, const void* from,
                                              int64_t num_bytes, int32_t device);
