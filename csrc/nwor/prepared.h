// SPDX-License-Identifier: Apache-2.0
//
// Prepared launches: log_cache_slots with restore_rejected_drafts, and stage with
// commit_draft_layer, for a caller that tells once what never changes and at each step
// only what a step changes. A step is two C functions, whatever the number of launches,
// instead of dispatches through PyTorch, whose code is not in the processor's cache
// when a step of a model has run since the last one.
//
// What a step hands over is all int64, addresses included; CUDA only. The columns are
// mirrored in vllm/v1/nwor/prepared.py, which compares nwor_prepared_version. It sends
// a step that is not as expected through the ops, which check everything; these
// functions check the number of their arguments.
//
// The two functions of a step have the signature of a Python builtin (METH_FASTCALL of
// the stable ABI), because an argument of a ctypes call costs as much as the launch.
// This library has no Python symbols: what it needs of the interpreter comes as
// addresses.
#pragma once

#include <cstdint>

#define NWOR_EXPORT extern "C" __attribute__((visibility("default")))

namespace nwor {

// What never changes, for each launch.
struct PreparedLaunch {
  int64_t table;  // its rows' address
  int64_t num_layers;
  int64_t undo_log;
  int64_t row_stride;
  int64_t row_bytes;
  int64_t log_slots;
  int64_t log_windows;
  int64_t counters;
};

// A step of log_cache_slots, followed by a LogStepLaunch for each launch.
struct LogStep {
  int64_t num_drafts;
  int64_t logits_indices;
  int64_t logits_indices_are_int64;
  int64_t num_logits;
  int64_t cu_num_logits;
  int64_t num_reqs;
};
struct LogStepLaunch {
  int64_t slot_mapping;
  int64_t num_tokens;
};

// A step of restore_rejected_drafts, or of commit_draft_layer (which ignores
// num_drafts).
struct RestoreStep {
  int64_t num_drafts;
  int64_t sampled_token_ids;
  int64_t row_stride;
  int64_t column_stride;
  int64_t num_columns;
  int64_t vocab_size;
  int64_t num_rejected;
  int64_t num_reqs;
  int64_t counters_to;  // [num_launches, kNumCounters] or 0
};

// What never changes, for each launch of stage and commit_draft_layer.
struct PreparedPages {
  int64_t table;
  int64_t num_layers;
  int64_t block_table;
  int64_t num_rows;
  int64_t row_stride;
  int64_t width;
  int64_t slot_mapping;
  int64_t num_slots_mapped;
  int64_t slot_mappings;  // the tensor that slot_mapping is a row of, or itself
  int64_t query_start_loc;
  int64_t seq_lens;
  int64_t most_reqs;  // that these have room for
  int64_t saved;
  int64_t num_seats;
  int64_t span;
  int64_t first_entry;
  int64_t num_real_entries;
  int64_t entry_tokens;
  int64_t counters;
};

// A step of stage, followed by a StageStepLaunch for each launch. What these say again
// of PreparedPages is compared: a step in which it differs is not made.
struct StageStep {
  int64_t cu_num_logits;
  int64_t seats;  // or 0; the commit of the step has the same
  int64_t seats_are_int64;
  int64_t num_reqs;
  int64_t step;
  int64_t query_start_loc;
  int64_t seq_lens;
};
struct StageStepLaunch {
  int64_t slot_mappings;
  int64_t block_table;
};

}  // namespace nwor

// found: room for 64. found[0]: raised with every change of what this file exports.
// found[1..7]: int64 values in each of the structs above, in their order.
NWOR_EXPORT void nwor_prepared_version(int64_t* found);

// Finds the driver's launch function and loads the kernels, which a step should not
// wait for. Returns nullptr, or why they cannot run on this device, a text that stays
// valid until the thread's next call.
NWOR_EXPORT const char* nwor_prepared_load(int64_t device);

// What the launches' structs say is copied. nwor_prepared_free takes the result.
NWOR_EXPORT void* nwor_prepared_new(const nwor::PreparedLaunch* launches,
                                    int64_t num_launches, int64_t device);
NWOR_EXPORT void* nwor_prepared_pages_new(const nwor::PreparedPages* launches,
                                          int64_t num_launches, int64_t device);
// Takes the result of either.
NWOR_EXPORT void nwor_prepared_free(void* prepared);

// What the functions below need of the interpreter; in C's own types.
struct NworInterpreter {
  long long (*as_long_long)(void* object);          // PyLong_AsLongLong
  void* (*error_occurred)();                        // PyErr_Occurred
  void (*set_error)(void* type, const char* text);  // PyErr_SetString
  void* runtime_error;                              // PyExc_RuntimeError
  void* yes;                                        // Py_True
  void* no;                                         // Py_False
  void (*add_reference)(void* object);              // Py_IncRef
};
NWOR_EXPORT void nwor_prepared_interpreter(const NworInterpreter* interpreter);

// Builtins: (address of the result of nwor_prepared_new, for the last two of
// nwor_prepared_pages_new, a column of the step's struct after another) -> whether the
// step is what was prepared; stage answers no, and does nothing, if it is not. Each
// enqueues every launch on PyTorch's current stream of the device, which must be the
// current device. Raises RuntimeError: for another number of arguments before anything
// is launched, else log, stage and commit at the first failure, restore after it has
// tried the other launches too.
NWOR_EXPORT void* nwor_prepared_log(void* self, void* const* arguments,
                                    int64_t num_arguments);
NWOR_EXPORT void* nwor_prepared_restore(void* self, void* const* arguments,
                                        int64_t num_arguments);
NWOR_EXPORT void* nwor_prepared_stage(void* self, void* const* arguments,
                                      int64_t num_arguments);
NWOR_EXPORT void* nwor_prepared_commit(void* self, void* const* arguments,
                                       int64_t num_arguments);
