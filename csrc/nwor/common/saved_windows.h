// SPDX-License-Identifier: Apache-2.0
//
// What a step did with the windows of its requests: the rows that `stage` saves, one
// for each seat, and that every later op of the step reads, the audit's included.
#pragma once

#include "common/window.h"

namespace nwor {

// Columns of a seat's row of `saved`, int32 [num_seats, 11 + 2 * span].
enum SavedColumn : int {
  kSavedDrafts,  // k; 0: no window here; -k: left alone
  kSavedFirstRow,
  kSavedFirstPosition,  // p0, of the first row
  kSavedSeqLen,
  kSavedFirstBlock,  // logical entry of the first draft
  kSavedNumBlocks,
  kSavedCopiedRows,
  kSavedTicket,      // blocks of a launch that have read their entries
  kSavedStep,        // in which the seat was last staged
  kSavedValid,       // behind the last row that its commit kept; -1 before commit
  kSavedValidEntry,  // real entry of that row; 0 if it was not staged
  kSavedEntries,     // real [span], then shadow [span]
};

// What stage keeps of the windows, for the other launches of the step.
struct SavedWindows {
  int32_t* data;
  int64_t num_seats;
  int64_t span;
  // Of each batch row its request's index in the runner's states. Without data the seat
  // of row r is r.
  IndexArray state_indices;
  const int32_t* seat_of_state;  // [num_states], or nullptr: the seat is the index
  int64_t num_states;

  NWOR_HOST_DEVICE int64_t seat(int64_t r) const {
    if (state_indices.data == nullptr) {
      return r;
    }
    const int64_t state = state_indices.at(r);
    if (seat_of_state == nullptr) {
      return state;
    }
    return state >= 0 && state < num_states ? seat_of_state[state] : -1;
  }
  // Requests can be more than seats. One without a seat is left alone.
  NWOR_HOST_DEVICE bool has_seat(int64_t r) const {
    return seat(r) >= 0 && seat(r) < num_seats;
  }
  NWOR_HOST_DEVICE int32_t* row(int64_t r) const {
    return data + seat(r) * (kSavedEntries + 2 * span);
  }
};

// Whether the last step that was staged has the window of row r in shadow blocks.
NWOR_HOST_DEVICE inline bool is_staged(const SavedWindows& windows, int64_t r) {
  return windows.has_seat(r) && windows.row(r)[kSavedDrafts] > 0;
}

}  // namespace nwor
