// SPDX-License-Identifier: Apache-2.0
//
// Shadow blocks: the arithmetic that CPU and CUDA share, and the launchers'
// arguments. Nothing is copied here.
//
// An entry of a block table stands for entry_tokens (T) positions of a request;
// entry e, offset o is slot e * T + o. A window's drafts are its last k positions.
// The entries that hold one of them are replaced by shadow entries while the
// window is verified; an entry that holds only the target token stays real.
//
// Worked example, T = 16: a request with 34 computed tokens, a target token and
// k = 4 drafts has p0 = 34 and seq_len = 39, drafts at 35 to 38, all in logical
// entry 2. Rows 32 and 33 are copied to its shadow; rows 34 to 38 are written
// there; with 2 drafts accepted rows 34 to 36 are copied back. In the next step p0
// is 37, the shadow has rows 32 to 36 already, and nothing is copied to it.
//
// Rows that are already in a seat's shadow are used only if all three hold; otherwise
// the committed rows of the first staged entry are copied again:
// - the seat's window was committed in the step before this one, by the host's
//   count of steps, which includes those without drafts;
// - that commit kept all rows before this step's p0, and none from there on;
// - the entry that holds row p0 - 1 is the one that it wrote the row to.
// Then no other request had the block in between: it would have needed a step without
// drafts to fill it. (The host's count skips a number where a request has drafts in its
// very first step: its rows may be a copy of another's block.)
#pragma once

#include "common/saved_windows.h"
#include "common/table.h"
#include "common/window.h"

namespace nwor {

constexpr const char* kStage = "stage";
constexpr const char* kCommit = "commit_draft_layer";
constexpr const char* kUnstage = "unstage";

// The logical entry that holds `position`. In 32 bits: wider divisions take a GPU long.
NWOR_HOST_DEVICE inline int32_t entry_of(int64_t position, int64_t entry_tokens) {
  return static_cast<int32_t>(position) / static_cast<int32_t>(entry_tokens);
}

// One window: a row of `saved` without its entries.
struct StagedWindow {
  int32_t num_drafts;
  int32_t first_row;
  int32_t first_position;
  int32_t seq_len;
  int32_t first_block;
  int32_t num_blocks;

  NWOR_HOST_DEVICE int64_t first_staged(int64_t entry_tokens) const {
    const int64_t start = first_block * entry_tokens;
    return start > first_position ? start : first_position;
  }
  NWOR_HOST_DEVICE int64_t first_draft() const { return seq_len - num_drafts; }
  // Committed rows of the first staged entry.
  NWOR_HOST_DEVICE int32_t num_before(int64_t entry_tokens) const {
    const int64_t rows = first_position - first_block * entry_tokens;
    return rows > 0 ? static_cast<int32_t>(rows) : 0;
  }
};

NWOR_HOST_DEVICE inline StagedWindow load_window(const int32_t* saved) {
  return {saved[kSavedDrafts], saved[kSavedFirstRow],   saved[kSavedFirstPosition],
          saved[kSavedSeqLen], saved[kSavedFirstBlock], saved[kSavedNumBlocks]};
}

// The window as the step of that number stages it; until its commit nothing in its
// shadow counts as present.
NWOR_HOST_DEVICE inline void save_window(int32_t* saved, const StagedWindow& window,
                                         int32_t num_copied, int32_t step) {
  saved[kSavedDrafts] = window.num_drafts;
  saved[kSavedFirstRow] = window.first_row;
  saved[kSavedFirstPosition] = window.first_position;
  saved[kSavedSeqLen] = window.seq_len;
  saved[kSavedFirstBlock] = window.first_block;
  saved[kSavedNumBlocks] = window.num_blocks;
  saved[kSavedCopiedRows] = num_copied;
  saved[kSavedStep] = step;
  saved[kSavedValid] = -1;
  saved[kSavedValidEntry] = 0;
}

// The largest span on CUDA, where a thread block keeps a window's entries in shared
// memory.
constexpr int kMaxSpan = 64;

struct ShadowStageArgs {
  LayerTable table;
  RunList runs;
  BlockTable blocks;
  const int32_t* query_start_loc;  // [num_reqs + 1]
  const int32_t* seq_lens;         // [num_reqs]
  const int32_t* cu_num_logits;    // [num_reqs]
  SavedWindows saved;
  int64_t first_entry;
  int64_t num_real_entries;
  int64_t entry_tokens;
  int64_t num_reqs;
  int32_t step;
  bool patches;
  bool rest_is_logged;  // windows that are not staged are the undo log's to count

  // Of batch row r and its logical entry `block`.
  NWOR_HOST_DEVICE int32_t shadow_entry(int64_t r, int64_t block) const {
    const auto span = static_cast<int32_t>(saved.span);
    return static_cast<int32_t>(first_entry + saved.seat(r) * span) +
           static_cast<int32_t>(block) % span;
  }
};

struct ShadowCommitArgs {
  LayerTable table;
  RunList runs;
  BlockTable blocks;
  SavedWindows saved;
  Acceptance acceptance;
  int64_t* counters;     // [kNumCounters]
  int64_t* counters_to;  // [kNumCounters], host memory, or nullptr
  int64_t entry_tokens;
  int64_t num_reqs;
  bool undoes;
};

struct ShadowUndoArgs {
  BlockTable blocks;
  SavedWindows saved;
  int64_t entry_tokens;
  int64_t num_reqs;
};

// kSavedDrafts of a window that is left alone.
NWOR_HOST_DEVICE inline int32_t left_alone(const ShadowStageArgs& args,
                                           int32_t num_drafts) {
  return args.rest_is_logged ? 0 : num_drafts < 0 ? num_drafts : -num_drafts;
}

// The window of request r by the batch's metadata; num_drafts is negative if it cannot
// be staged, 0 without drafts. Its entries and slots are not checked.
NWOR_HOST_DEVICE inline StagedWindow find_window(const ShadowStageArgs& args,
                                                 int64_t r) {
  // All loads first, so that they overlap.
  const int32_t first_logits = r == 0 ? 0 : args.cu_num_logits[r - 1];
  const int32_t num_drafts = args.cu_num_logits[r] - first_logits - 1;
  const int32_t first_row = args.query_start_loc[r];
  const int32_t num_rows = args.query_start_loc[r + 1] - first_row;
  const int32_t seq_len = args.seq_lens[r];
  StagedWindow window{};
  if (num_drafts <= 0) {
    return window;
  }
  window.num_drafts = num_drafts;
  window.first_row = first_row;
  window.seq_len = seq_len;
  window.first_position = seq_len - num_rows;
  window.first_block = entry_of(window.first_draft(), args.entry_tokens);
  const int32_t last_block = entry_of(seq_len - 1, args.entry_tokens);
  window.num_blocks = last_block - window.first_block + 1;
  const bool fits = num_rows > num_drafts && window.first_position >= 0 &&
                    window.first_row >= 0 &&
                    window.first_row + num_rows <= args.blocks.num_slots_mapped &&
                    window.num_blocks <= args.saved.span &&
                    last_block < args.blocks.width && r < args.blocks.num_rows;
  if (!fits) {
    window.num_drafts = -num_drafts;
  }
  return window;
}

// Entry i of the window may be replaced.
NWOR_HOST_DEVICE inline bool is_real_entry(const ShadowStageArgs& args, int64_t r,
                                           const StagedWindow& window, int64_t i) {
  const int32_t entry = args.blocks.at(r, window.first_block + i);
  return entry > 0 && entry < args.num_real_entries;
}

// What the previous step left of a seat.
struct SeatState {
  int32_t step;
  int32_t valid;
  int32_t valid_entry;
};

NWOR_HOST_DEVICE inline SeatState load_seat(const int32_t* saved) {
  return {saved[kSavedStep], saved[kSavedValid], saved[kSavedValidEntry]};
}

// The number of committed rows of the window's first staged entry that its shadow
// lacks. entry: the real one.
NWOR_HOST_DEVICE inline int32_t num_lacking(const ShadowStageArgs& args,
                                            const SeatState& seat,
                                            const StagedWindow& window, int32_t entry) {
  const bool has_all = seat.step == args.step - 1 &&
                       seat.valid == window.first_position && seat.valid_entry == entry;
  return has_all ? 0 : window.num_before(args.entry_tokens);
}

// What commit leaves for the next step's num_lacking.
NWOR_HOST_DEVICE inline void save_valid(int32_t* saved, const StagedWindow& window,
                                        int64_t num_kept, int64_t entry_tokens) {
  const int64_t valid = window.first_draft() + num_kept;
  const int32_t block = entry_of(valid - 1, entry_tokens);
  saved[kSavedValid] = static_cast<int32_t>(valid);
  saved[kSavedValidEntry] = block < window.first_block
                                ? 0
                                : saved[kSavedEntries + block - window.first_block];
}

// The slot of `position` by entries[0 .. num_blocks) of the window.
NWOR_HOST_DEVICE inline int64_t slot_by_entries(const StagedWindow& window,
                                                const int32_t* entries,
                                                int64_t position,
                                                int64_t entry_tokens) {
  const int32_t block = entry_of(position, entry_tokens);
  return static_cast<int64_t>(entries[block - window.first_block]) * entry_tokens +
         (position - block * entry_tokens);
}

NWOR_HOST_DEVICE inline int64_t clamp_accepted(int64_t accepted, int64_t num_drafts) {
  return accepted < 0 ? 0 : accepted > num_drafts ? num_drafts : accepted;
}

void stage_cpu(const ShadowStageArgs& args);
void commit_draft_layer_cpu(const ShadowCommitArgs& args);
void unstage_cpu(const ShadowUndoArgs& args);

#ifdef NWOR_CUDA
// `stream` is a cudaStream_t of the current device.
void stage_cuda(const ShadowStageArgs& args, int device, void* stream);
void commit_draft_layer_cuda(const ShadowCommitArgs& args, int device, void* stream);
void unstage_cuda(const ShadowUndoArgs& args, int device, void* stream);
// One-time initialization of the kernels on a device.
void load_shadow_kernels(const char* op, int device);
#endif

}  // namespace nwor
