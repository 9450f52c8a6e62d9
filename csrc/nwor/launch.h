// SPDX-License-Identifier: Apache-2.0
//
// The launchers: what the bindings call, with raw pointers and no torch types.
// One struct of arguments for each op, the same for CPU and CUDA.
//
// A CPU launcher checks every value that it will use before it writes the first
// byte. A CUDA launcher cannot read device values: it checks what the host
// knows, and its kernel leaves alone what would be out of bounds.
#pragma once

#include "table.h"
#include "window.h"

namespace nwor {

struct LogArgs {
  LayerTable table;
  RunList runs;
  BatchWindows batch;
  UndoLog log;
  int64_t num_drafts;
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

// Rows of heads of elements, any strides (in bytes).
struct HeadRows {
  uint8_t* bytes;
  int64_t row_stride;
  int64_t head_stride;
  int64_t dim_stride;
  int64_t num_heads;
  int64_t head_size;
};

// A cache [num_blocks, num_heads, block_size, head_size], any strides.
struct PagedRows {
  HeadRows rows;  // row_stride: from a slot to the next in its block
  int64_t block_stride;
  int64_t num_blocks;
  int64_t block_size;

  NWOR_HOST_DEVICE int64_t num_slots() const { return num_blocks * block_size; }
  NWOR_HOST_DEVICE uint8_t* slot(int64_t slot) const {
    return rows.bytes + slot / block_size * block_stride +
           slot % block_size * rows.row_stride;
  }
};

struct StageArgs {
  HeadRows key, value;                  // by token
  HeadRows staging_key, staging_value;  // by draft
  int64_t element_bytes;
  BatchWindows batch;
  int64_t* log_slots;    // [capacity]
  int32_t* log_windows;  // [capacity, 3]
  int64_t num_drafts;
};

struct CommitArgs {
  HeadRows staging_key, staging_value;  // by draft
  PagedRows key_cache, value_cache;
  int64_t element_bytes;
  const int64_t* log_slots;    // [capacity]
  const int32_t* log_windows;  // [capacity, 3]
  Acceptance acceptance;
  int64_t num_drafts;
};

// The oracles: one cache tensor, one list of slots.
struct SingleArgs {
  PagedRows cache;  // head_size and dim_stride in elements of element_bytes
  int64_t element_bytes;
  const int64_t* slots;       // [num_slots]
  const bool* rejected_mask;  // [num_slots]; restore only
  uint8_t* log;               // [>= num_slots, row_stride]
  int64_t log_row_stride;
  int64_t num_slots;
};

void log_cache_slots_cpu(const LogArgs& args);
void restore_rejected_drafts_cpu(const RestoreArgs& args);
void stage_cpu(const StageArgs& args);
void commit_draft_layer_cpu(const CommitArgs& args);
void log_cache_slots_single_cpu(const SingleArgs& args);
void restore_rejected_drafts_single_cpu(const SingleArgs& args);

#ifdef NWOR_CUDA
// `stream` is a cudaStream_t of the current device.
void log_cache_slots_cuda(const LogArgs& args, int device, void* stream);
void restore_rejected_drafts_cuda(const RestoreArgs& args, int device, void* stream);
// What the first launches of log and restore on a device would do besides.
void load_cow_kernels(const char* op, int device);
// Refuses memory for RestoreArgs::counters_to that a kernel could not write to.
void check_device_sees(const char* op, const int64_t* counters_to);
void stage_cuda(const StageArgs& args, int device, void* stream);
void commit_draft_layer_cuda(const CommitArgs& args, int device, void* stream);
void log_cache_slots_single_cuda(const SingleArgs& args, int device, void* stream);
void restore_rejected_drafts_single_cuda(const SingleArgs& args, int device,
                                         void* stream);
#endif

}  // namespace nwor
