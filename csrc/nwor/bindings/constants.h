// SPDX-License-Identifier: Apache-2.0
//
// The constants that Python reads from the module, or compares with its own when it
// loads it (vllm/v1/nwor/ops.py). Include Python.h first.
#pragma once

#include <cstddef>
#include <iterator>

#include "audit/audit.h"
#include "common/saved_windows.h"
#include "common/table.h"
#include "transaction/shadow.h"

namespace nwor {

struct Constant {
  const char* name;
  int64_t value;
};

// The number of int64 in a row whose struct is Row.
template <typename Row>
constexpr int64_t kColumns = sizeof(Row) / sizeof(int64_t);

constexpr Constant kConstants[] = {
    {"PAD_SLOT", kPadSlot},
    {"INVALID_SLOT", kInvalidSlot},
    {"SAVED_COLUMNS", kSavedEntries},
    {"MAX_SPAN", kMaxSpan},
    {"MAX_REQS", kMaxReqs},
    {"MAX_FEATURES", kMaxFeatures},
    {"FEATURE_COLUMNS", kColumns<Feature>},
    {"RECORD_COLUMNS", kColumns<SlotRecord>},
    {"SEAT_COLUMNS", kColumns<Seat>},
    {"PLAN_COLUMNS", kColumns<PlanRow>},
    {"FINDING_COLUMNS", kColumns<Finding>},
};

#define NWOR_COLUMN(name) {#name, offsetof(LayerRow, name) / sizeof(int64_t)}
constexpr Constant kTableColumns[] = {
    NWOR_COLUMN(base),        NWOR_COLUMN(block_stride), NWOR_COLUMN(slot_stride),
    NWOR_COLUMN(head_stride), NWOR_COLUMN(num_heads),    NWOR_COLUMN(run_bytes),
    NWOR_COLUMN(block_size),  NWOR_COLUMN(num_blocks),   NWOR_COLUMN(log_offset)};
#undef NWOR_COLUMN
static_assert(std::size(kTableColumns) == kNumTableColumns);

constexpr Constant kCounterColumns[] = {
    {"windows", kWindows},
    {"staged", kStaged},
    {"committed", kCommitted},
    {"rejected", kRejected},
    {"shadow_windows", kShadowWindows},
    {"restored_bytes", kRestoredBytes},
    {"invalid_slots", kInvalidSlots},
    {"shadow_copied_bytes", kShadowCopiedBytes},
    {"committed_bytes", kCommittedBytes},
};
static_assert(std::size(kCounterColumns) == kNumCounters);

constexpr Constant kFindingClasses[] = {
    {"foreign_write", kForeignWrite},
    {"wrong_prefix", kWrongPrefix},
    {"changed", kChanged},
    {"missing_write", kMissingWrite},
    {"handed_on", kHandedOn},
    {"never_loaded", kNeverLoaded},
};
static_assert(std::size(kFindingClasses) == kNumFindingClasses);

constexpr Constant kLoads[] = {
    {"NONE", kNoLoads}, {"KNOWN", kKnownLoads}, {"UNKNOWN", kUnknownLoads}};

constexpr Constant kBlockEvents[] = {
    {"GIVEN", kGiven}, {"FILLED", kFilled}, {"STORED", kStored}};

// False with an exception set.
template <size_t kSize>
bool add_dict(PyObject* module, const char* name, const Constant (&constants)[kSize]) {
  PyObject* const dict = PyDict_New();
  for (const Constant& constant : constants) {
    PyObject* const value = PyLong_FromLongLong(constant.value);
    const bool is_set =
        value != nullptr && PyDict_SetItemString(dict, constant.name, value) == 0;
    Py_XDECREF(value);
    if (!is_set) {
      return false;
    }
  }
  return PyModule_AddObject(module, name, dict) == 0;
}

inline bool add_constants(PyObject* module) {
  for (const Constant& constant : kConstants) {
    if (PyModule_AddIntConstant(module, constant.name, constant.value) != 0) {
      return false;
    }
  }
  return add_dict(module, "TABLE_COLUMNS", kTableColumns) &&
         add_dict(module, "COUNTER_COLUMNS", kCounterColumns) &&
         add_dict(module, "FINDING_CLASSES", kFindingClasses) &&
         add_dict(module, "LOADS", kLoads) &&
         add_dict(module, "BLOCK_EVENTS", kBlockEvents);
}

}  // namespace nwor
