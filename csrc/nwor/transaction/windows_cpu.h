// SPDX-License-Identifier: Apache-2.0
//
// What the CPU launchers share: the checks of a batch's metadata and of a log's
// windows, a walk over the drafts, and the entries that a log keeps of them.
#pragma once

#include "common/check.h"
#include "common/window.h"

namespace nwor {

// The cumulative sum is one of 1 + k rows a request, within logits_indices, and
// its drafts fit into num_drafts.
inline void check_windows(const char* op, const BatchWindows& batch,
                          int64_t num_drafts) {
  int64_t previous = 0;
  for (int64_t r = 0; r < batch.num_reqs; ++r) {
    const int64_t current = batch.cu_num_logits[r];
    NWOR_CHECK(current > previous, op, "cu_num_logits[", r, "] is ", current,
               "; must be more than ", previous, ", each request has at least one row");
    previous = current;
  }
  NWOR_CHECK(previous <= batch.num_logits, op, "cu_num_logits ends at ", previous,
             "; logits_indices has only ", batch.num_logits, " rows");
  const int64_t true_drafts = previous - batch.num_reqs;
  NWOR_CHECK(true_drafts <= num_drafts, op, "num_drafts is ", num_drafts,
             "; must be at least ", true_drafts, ", the drafts in ", "cu_num_logits");
}

// Calls visit(draft, place, slot) in order. Needs check_windows.
template <typename Visit>
void for_each_draft(const char* op, const BatchWindows& batch, const Visit& visit) {
  int64_t draft = 0;
  for (int64_t r = 0; r < batch.num_reqs; ++r) {
    for (; draft < drafts_through(batch.cu_num_logits, r); ++draft) {
      const DraftPlace place = place_in_request(batch.cu_num_logits, r, draft);
      const int64_t token = batch.logits_indices.at(place.logits_row);
      NWOR_CHECK(token >= 0 && token < batch.num_tokens, op, "logits_indices[",
                 place.logits_row, "] is ", token, "; must be between 0 and ",
                 batch.num_tokens - 1, ", the last entry of slot_mapping");
      visit(draft, place, batch.slot_mapping[token]);
    }
  }
}

// Writes the entries of all drafts, and "not a draft" for those in shadow blocks and
// from the last one to num_drafts.
inline void write_windows(const char* op, const BatchWindows& batch, int64_t* log_slots,
                          int32_t* log_windows, int64_t num_drafts,
                          int64_t first_shadow_slot) {
  int64_t next = 0;
  for_each_draft(op, batch, [&](int64_t draft, const DraftPlace& place, int64_t slot) {
    const bool is_staged = slot >= first_shadow_slot;
    write_log_entry(log_slots, log_windows, draft, is_staged ? no_draft() : place,
                    is_staged ? kPadSlot : slot);
    next = draft + 1;
  });
  for (; next < num_drafts; ++next) {
    write_log_entry(log_slots, log_windows, next, no_draft(), kPadSlot);
  }
}

inline bool is_draft(const int32_t* log_windows, int64_t draft) {
  return log_windows[3 * draft] >= 0;
}

// Only for a draft whose window was checked.
inline bool is_accepted(const int32_t* log_windows, int64_t draft,
                        const Acceptance& acceptance) {
  const int32_t* window = log_windows + 3 * draft;
  return window[1] < num_accepted(acceptance, window[0], window[2]);
}

// The window that a log keeps for `draft` can be looked up in the acceptance.
inline void check_logged_window(const char* op, const int32_t* log_windows,
                                int64_t draft, const Acceptance& acceptance) {
  const int32_t* window = log_windows + 3 * draft;
  NWOR_CHECK(window[0] >= -1 && window[0] < acceptance.num_reqs, op, "log_windows[",
             draft, "] has request ", window[0],
             "; must be -1 (not a draft) or between 0 and ", acceptance.num_reqs - 1,
             ", the last row of ",
             acceptance.num_rejected != nullptr ? "num_rejected" : "sampled_token_ids");
  NWOR_CHECK(window[0] < 0 || (window[1] >= 0 && window[1] < window[2]), op,
             "log_windows[", draft, "] has position ", window[1],
             "; must be between 0 and ", window[2] - 1,
             ", the last draft of its window");
}

}  // namespace nwor
