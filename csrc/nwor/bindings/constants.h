// SPDX-License-Identifier: Apache-2.0
//
// The constants that Python reads from the module, or compares with its own when it
// loads it (vllm/v1/nwor/ops.py). Include Python.h first.
#pragma once

#include <cstddef>

#include "audit/states.h"
#include "common/saved_windows.h"
#include "common/table.h"
#include "transaction/shadow.h"

namespace nwor {

struct Constant {
  const char* name;
  int64_t value;
};

// The number of int64 in a row with the struct Row.
template <typename Row>
constexpr int64_t kColumns = sizeof(Row) / sizeof(int64_t);

// False with an exception set, as the others here. kNumber: of the names there are.
template <size_t kNumber, size_t kSize>
bool add_dict(PyObject* module, const char* name, const Constant (&constants)[kSize]) {
  static_assert(kNumber == kSize, "each has a name");
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

inline bool add_numbers(PyObject* module) {
  for (const Constant& constant : {
           Constant{"PAD_SLOT", kPadSlot},
           Constant{"INVALID_SLOT", kInvalidSlot},
           Constant{"SAVED_COLUMNS", kSavedEntries},
           Constant{"MAX_SPAN", kMaxSpan},
           Constant{"MAX_REQS", kMaxReqs},
           Constant{"MAX_FEATURES", kMaxFeatures},
           Constant{"FEATURE_COLUMNS", kColumns<Feature>},
           Constant{"RECORD_COLUMNS", kColumns<SlotRecord>},
           Constant{"SEAT_COLUMNS", kColumns<Seat>},
           Constant{"PLAN_COLUMNS", kColumns<PlanRow>},
           Constant{"FINDING_COLUMNS", kColumns<Finding>},
           Constant{"DIGEST_COLUMNS", kColumns<BlockDigest>},
           Constant{"STATE_COLUMNS", kColumns<State>},
           Constant{"STATE_SEAT_COLUMNS", kColumns<StateSeat>},
           Constant{"STATE_RECORD_COLUMNS", kColumns<StateRecord>},
           Constant{"VERDICT_COLUMNS", kColumns<Verdict>},
           Constant{"SAMPLE_WORDS", kSampleWords},
           Constant{"SAMPLE_PARTS", kSampleParts},
           Constant{"MAX_BUFFER", kMaxBuffer},
           Constant{"MAX_STATES", kMaxStates},
           Constant{"MAX_STATE_GROUPS", kMaxStateGroups},
       }) {
    if (PyModule_AddIntConstant(module, constant.name, constant.value) != 0) {
      return false;
    }
  }
  return true;
}

#define NWOR_COLUMN(name) {#name, offsetof(LayerRow, name) / sizeof(int64_t)}
inline bool add_constants(PyObject* module) {
  return add_numbers(module) &&
         add_dict<kNumTableColumns>(
             module, "TABLE_COLUMNS",
             {NWOR_COLUMN(base), NWOR_COLUMN(block_stride), NWOR_COLUMN(slot_stride),
              NWOR_COLUMN(head_stride), NWOR_COLUMN(num_heads), NWOR_COLUMN(run_bytes),
              NWOR_COLUMN(block_size), NWOR_COLUMN(num_blocks),
              NWOR_COLUMN(log_offset)}) &&
         add_dict<kNumCounters>(module, "COUNTER_COLUMNS",
                                {{"windows", kWindows},
                                 {"staged", kStaged},
                                 {"committed", kCommitted},
                                 {"rejected", kRejected},
                                 {"shadow_windows", kShadowWindows},
                                 {"restored_bytes", kRestoredBytes},
                                 {"invalid_slots", kInvalidSlots},
                                 {"shadow_copied_bytes", kShadowCopiedBytes},
                                 {"committed_bytes", kCommittedBytes}}) &&
         add_dict<kNumFindingClasses>(module, "FINDING_CLASSES",
                                      {{"foreign_write", kForeignWrite},
                                       {"wrong_prefix", kWrongPrefix},
                                       {"changed", kChanged},
                                       {"missing_write", kMissingWrite},
                                       {"handed_on", kHandedOn},
                                       {"never_loaded", kNeverLoaded},
                                       {"stale_state", kStaleState},
                                       {"foreign_state", kForeignState},
                                       {"changed_state", kChangedState},
                                       {"state_not_written", kStateNotWritten},
                                       {"no_state_yet", kNoStateYet},
                                       {"state_lost", kStateLost},
                                       {"state_ahead", kStateAhead},
                                       {"ring_overwritten", kRingOverwritten}}) &&
         add_dict<3>(module, "LOADS",
                     {{"NONE", kNoLoads},
                      {"KNOWN", kKnownLoads},
                      {"UNKNOWN", kUnknownLoads}}) &&
         add_dict<3>(module, "HANDOVERS",
                     {{"NONE", kNoHandover}, {"GIVES", kGives}, {"TAKES", kTakes}}) &&
         add_dict<4>(module, "DIGEST_KINDS",
                     {{"COMPUTED", kComputed},
                      {"LOADED", kLoaded},
                      {"FOUND", kFound},
                      {"TAIL", kTail}}) &&
         add_dict<3>(module, "BLOCK_EVENTS",
                     {{"GIVEN", kGiven}, {"FILLED", kFilled}, {"STORED", kStored}});
}
#undef NWOR_COLUMN

}  // namespace nwor
