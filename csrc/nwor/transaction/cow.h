// SPDX-License-Identifier: Apache-2.0
//
// The launchers of log and restore: what the ops call, with raw pointers and no torch
// types. One struct of arguments for each op, the same for CPU and CUDA.
//
// A CPU launcher checks every value that it will use before it writes the first
// byte. A CUDA launcher cannot read device values: it checks what the host
// knows, and its kernel leaves alone what would be out of bounds.
#pragma once

#include "common/table.h"
#include "common/window.h"

namespace nwor {

constexpr const char* kLog = "log_cache_slots";
constexpr const char* kRestore = "restore_rejected_drafts";

struct LogArgs {
  LayerTable table;
  RunList runs;
  BatchWindows batch;
  UndoLog log;
  int64_t num_drafts;
  // Slots from here on are shadow blocks': a draft there is staged, and not logged.
  int64_t first_shadow_slot;
};

struct RestoreArgs {
  LayerTable table;
  RunList runs;
  UndoLog log;
  Acceptance acceptance;
  int64_t* counters;     // [kNumCounters]
  int64_t* counters_to;  // [kNumCounters], host memory, or nullptr
  int64_t num_drafts;
};

void log_cache_slots_cpu(const LogArgs& args);
void restore_rejected_drafts_cpu(const RestoreArgs& args);

#ifdef NWOR_CUDA
// `stream` is a cudaStream_t of the current device.
void log_cache_slots_cuda(const LogArgs& args, int device, void* stream);
void restore_rejected_drafts_cuda(const RestoreArgs& args, int device, void* stream);
// One-time initialization of log and restore on a device.
void load_cow_kernels(const char* op, int device);
#endif

}  // namespace nwor
