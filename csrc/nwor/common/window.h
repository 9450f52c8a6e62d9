// SPDX-License-Identifier: Apache-2.0
//
// Window arithmetic: which rows of a batch are drafts, and which drafts were
// accepted. The same functions serve CPU and CUDA. Nothing is copied here.
//
// Request r of a batch has 1 + k[r] logits rows: first the target token, which
// is always kept, then its k[r] drafts. cu_num_logits is their inclusive
// cumulative sum. Drafts are numbered over the whole batch without the target
// tokens. Worked example: k = [2, 0, 1] gives cu_num_logits = [3, 4, 6]; drafts
// 0 and 1 are logits rows 1 and 2 of request 0, draft 2 is row 5 of request 2.
#pragma once

#include "common/table.h"

namespace nwor {

// An index tensor that comes as int32 or as int64.
struct IndexArray {
  const void* data;
  bool is_int64;

  NWOR_HOST_DEVICE int64_t at(int64_t i) const {
    return is_int64 ? static_cast<const int64_t*>(data)[i]
                    : static_cast<const int32_t*>(data)[i];
  }
};

// vLLM's metadata of a batch, as it comes.
struct BatchWindows {
  const int64_t* slot_mapping;  // [num_tokens]
  int64_t num_tokens;
  IndexArray logits_indices;  // [num_logits]
  int64_t num_logits;
  const int32_t* cu_num_logits;  // [num_reqs]
  int64_t num_reqs;
};

// The block table and slots of a batch, which stage replaces.
struct BlockTable {
  int32_t* entries;
  int64_t num_rows;
  int64_t row_stride;
  int64_t width;
  int64_t* slot_mapping;
  int64_t num_slots_mapped;

  NWOR_HOST_DEVICE int32_t& at(int64_t r, int64_t block) const {
    return entries[r * row_stride + block];
  }
};

// A draft's place. request == -1: not a draft.
struct DraftPlace {
  int32_t request;
  int32_t position;    // in its window, from 0
  int32_t num_drafts;  // of its window
  int64_t logits_row;
};

NWOR_HOST_DEVICE inline DraftPlace no_draft() {
  return {-1, -1, 0, -1};
}

// What an undo log keeps of a draft: its slot, and [request, position, num_drafts].
NWOR_HOST_DEVICE inline void write_log_entry(int64_t* log_slots, int32_t* log_windows,
                                             int64_t draft, const DraftPlace& place,
                                             int64_t slot) {
  log_slots[draft] = slot;
  log_windows[3 * draft] = place.request;
  log_windows[3 * draft + 1] = place.position;
  log_windows[3 * draft + 2] = place.num_drafts;
}

// Number of drafts of requests 0 to r, r included. The request of draft d is the
// smallest r with d < drafts_through(r).
NWOR_HOST_DEVICE inline int64_t drafts_through(const int32_t* cu_num_logits,
                                               int64_t r) {
  return static_cast<int64_t>(cu_num_logits[r]) - (r + 1);
}

// Place of draft d, known to belong to request r.
NWOR_HOST_DEVICE inline DraftPlace place_in_request(const int32_t* cu_num_logits,
                                                    int64_t r, int64_t d) {
  const int64_t first_row = r == 0 ? 0 : cu_num_logits[r - 1];
  const int64_t num_drafts = cu_num_logits[r] - first_row - 1;
  return {static_cast<int32_t>(r), static_cast<int32_t>(d - (first_row - r)),
          static_cast<int32_t>(num_drafts), d + r + 1};
}

// The sampler's result. Exactly one of the two pointers is set.
struct Acceptance {
  const int32_t* sampled_token_ids;  // [num_reqs, num_columns]
  int64_t row_stride;                // in elements, as column_stride
  int64_t column_stride;
  int64_t num_columns;
  int64_t vocab_size;
  const int32_t* num_rejected;  // [num_reqs]
  int64_t num_reqs;

  // vLLM's rule for a token that was really sampled.
  NWOR_HOST_DEVICE bool is_valid(int64_t request, int64_t column) const {
    const int32_t token =
        sampled_token_ids[request * row_stride + column * column_stride];
    return token != -1 && token < vocab_size;
  }
};

// Number of accepted drafts in the window of `request`: one of the sampled
// tokens is not a draft, so n valid tokens mean n - 1 accepted drafts.
NWOR_HOST_DEVICE inline int64_t num_accepted(const Acceptance& acceptance,
                                             int64_t request, int64_t num_drafts) {
  if (acceptance.num_rejected != nullptr) {
    return num_drafts - acceptance.num_rejected[request];
  }
  int64_t num_valid = 0;
  for (int64_t column = 0; column < acceptance.num_columns; ++column) {
    num_valid += acceptance.is_valid(request, column);
  }
  return num_valid > 0 ? num_valid - 1 : 0;
}

}  // namespace nwor
