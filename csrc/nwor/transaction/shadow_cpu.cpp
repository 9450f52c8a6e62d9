// SPDX-License-Identifier: Apache-2.0
//
// CPU launchers of shadow blocks: check every value, then copy, then patch. The
// readable specification of what the CUDA kernels do.
#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/copy_cpu.h"
#include "common/parallel.h"
#include "common/table_cpu.h"
#include "transaction/shadow.h"

namespace nwor {
namespace {

// Neighbouring slots of one cache block, at the same offset in another.
struct SlotRange {
  int64_t from;
  int64_t to;
  int64_t count;
};

enum class Way { kToShadow, kToReal };

// Adds the rows at positions [first, last) of a window, a cache block at a time.
void add_rows(std::vector<SlotRange>& ranges, const StagedWindow& window,
              const int32_t* entries, int64_t span, int64_t first, int64_t last,
              int64_t entry_tokens, int64_t block_size, Way way) {
  while (first < last) {
    const int64_t real = slot_by_entries(window, entries, first, entry_tokens);
    const int64_t shadow = slot_by_entries(window, entries + span, first, entry_tokens);
    const int64_t count = std::min(last - first, block_size - first % block_size);
    ranges.push_back(way == Way::kToShadow ? SlotRange{real, shadow, count}
                                           : SlotRange{shadow, real, count});
    first += count;
  }
}

void copy_rows(const LayerRow& layer, const SlotRange& range) {
  auto* base = reinterpret_cast<uint8_t*>(layer.base);
  const uint8_t* from = base + layer.slot_offset(range.from);
  uint8_t* to = base + layer.slot_offset(range.to);
  for (int64_t head = 0; head < layer.num_heads; ++head) {
    const int64_t offset = head * layer.head_stride;
    if (layer.slot_stride == layer.run_bytes) {
      copy_bytes(to + offset, from + offset, range.count * layer.run_bytes);
      continue;
    }
    for (int64_t i = 0; i < range.count; ++i) {
      copy_bytes(to + offset + i * layer.slot_stride,
                 from + offset + i * layer.slot_stride, layer.run_bytes);
    }
  }
}

// Run j of neighbouring slots lies together in most packings: one copy.
void copy_packed(const LayerRow& layer, const RunList& runs, const SlotRange& range) {
  auto* base = reinterpret_cast<uint8_t*>(layer.base);
  const uint8_t* from = base + layer.block_offset(range.from);
  uint8_t* to = base + layer.block_offset(range.to);
  const int64_t first = range.from % runs.block_size;
  const int32_t* run = runs.of(first);
  const int64_t next = runs.num_runs * 2;
  for (int64_t j = 0; j < runs.num_runs; ++j) {
    if (j + kPrefetchRuns < runs.num_runs) {
      const int32_t ahead = run[2 * (j + kPrefetchRuns)];
      __builtin_prefetch(from + ahead);
      __builtin_prefetch(to + ahead, 1);
    }
    int64_t i = 0;
    while (i < range.count) {
      const int64_t offset = run[i * next + 2 * j];
      int64_t length = run[i * next + 2 * j + 1];
      ++i;
      while (i < range.count && run[i * next + 2 * j] == offset + length) {
        length += run[i * next + 2 * j + 1];
        ++i;
      }
      copy_bytes(to + offset, from + offset, length);
    }
  }
}

void copy_all(const LayerTable& table, const RunList& runs,
              const std::vector<SlotRange>& ranges) {
  int64_t num_slots = 0;
  for (const SlotRange& range : ranges) {
    num_slots += range.count;
  }
  const auto count = static_cast<int64_t>(ranges.size());
  if (count == 0) {
    return;
  }
  const int64_t cost = slot_cost(table, runs) * (num_slots / count + 1);
  const int64_t grain = std::max<int64_t>(1, kCostPerThread / cost);
  parallel_for(count * table.num_layers, grain, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const SlotRange& range = ranges[static_cast<size_t>(item / table.num_layers)];
      const LayerRow& layer = table.rows[item % table.num_layers];
      if (runs.data != nullptr) {
        copy_packed(layer, runs, range);
      } else {
        copy_rows(layer, range);
      }
    }
  });
}

// Neighbouring slots that are in one block in every layer.
int64_t slots_together(const LayerTable& table) {
  int64_t slots = table.rows[0].block_size;
  for (int64_t i = 1; i < table.num_layers; ++i) {
    slots = std::gcd(slots, table.rows[i].block_size);
  }
  return slots;
}

// Bytes of a slot in all layers, by the first one's runs; those and the layers are
// checked.
int64_t check_table(const char* op, const LayerTable& table, const RunList& runs,
                    int64_t entry_tokens) {
  check_layers(op, table, runs);
  int64_t bytes = 0;
  for (int64_t i = 0; i < table.num_layers; ++i) {
    const LayerRow& layer = table.rows[i];
    NWOR_CHECK(entry_tokens % layer.block_size == 0, op, "entry_tokens is ",
               entry_tokens, "; must be a multiple of the block size ",
               layer.block_size, " of table row ", i);
    bytes += layer.num_heads * layer.run_bytes;
  }
  if (runs.data == nullptr) {
    return bytes;
  }
  return check_runs(op, table, runs, 0) * table.num_layers;
}

// The runs of the rows at positions [first, last), which are to be copied.
void check_rows(const char* op, const LayerTable& table, const RunList& runs,
                int64_t slot_bytes, int64_t first, int64_t last) {
  for (int64_t p = first; runs.data != nullptr && p < last; ++p) {
    const int64_t found = check_runs(op, table, runs, p);
    NWOR_CHECK(found * table.num_layers == slot_bytes, op, "runs[", p % runs.block_size,
               "] are ", found, " bytes long; must be ", slot_bytes / table.num_layers,
               ", as in runs[0]");
  }
}

// No seat is two rows'.
void check_seats(const char* op, const SavedWindows& saved, int64_t num_reqs) {
  std::vector<bool> is_taken(static_cast<size_t>(saved.num_seats));
  for (int64_t r = 0; saved.state_indices.data != nullptr && r < num_reqs; ++r) {
    if (!saved.has_seat(r)) {
      continue;
    }
    const auto seat = static_cast<size_t>(saved.seat(r));
    NWOR_CHECK(!is_taken[seat], op, "state_indices[", r, "] is ",
               saved.state_indices.at(r),
               "; must be another one, an earlier row has it");
    is_taken[seat] = true;
  }
}

void check_batch(const ShadowStageArgs& args) {
  check_seats(kStage, args.saved, args.num_reqs);
  const int64_t num_entries = args.table.rows[0].num_slots() / args.entry_tokens;
  int64_t num_used = 0;
  for (int64_t r = 0; r < args.num_reqs; ++r) {
    if (args.saved.has_seat(r)) {
      num_used = std::max(num_used, args.saved.seat(r) + 1);
    }
  }
  NWOR_CHECK(args.first_entry + num_used * args.saved.span <= num_entries, kStage,
             "first_entry is ", args.first_entry, "; the shadow entries of ", num_used,
             " seats must end at ", num_entries, ", the end of the cache");
  for (int64_t r = 0; r < args.num_reqs; ++r) {
    const int32_t previous = r == 0 ? 0 : args.cu_num_logits[r - 1];
    NWOR_CHECK(args.cu_num_logits[r] > previous, kStage, "cu_num_logits[", r, "] is ",
               args.cu_num_logits[r], "; must be more than ", previous,
               ", each request has at least one row");
    NWOR_CHECK(args.query_start_loc[r + 1] >= args.query_start_loc[r], kStage,
               "query_start_loc[", r + 1, "] is ", args.query_start_loc[r + 1],
               "; must be at least ", args.query_start_loc[r]);
  }
  const int32_t first = args.query_start_loc[0];
  const int32_t last = args.query_start_loc[args.num_reqs];
  NWOR_CHECK(first >= 0 && last <= args.blocks.num_slots_mapped, kStage,
             "query_start_loc goes from ", first, " to ", last,
             "; must be between 0 and ", args.blocks.num_slots_mapped,
             ", the entries of slot_mapping");
}

bool may_be_staged(const ShadowStageArgs& args, int64_t r, const StagedWindow& window) {
  for (int64_t i = 0; i < window.num_blocks; ++i) {
    if (!is_real_entry(args, r, window, i)) {
      return false;
    }
  }
  const int32_t* entries = &args.blocks.at(r, window.first_block);
  for (int64_t p = window.first_staged(args.entry_tokens); p < window.seq_len; ++p) {
    const int64_t row = window.first_row + (p - window.first_position);
    if (args.blocks.slot_mapping[row] !=
        slot_by_entries(window, entries, p, args.entry_tokens)) {
      return false;
    }
  }
  return true;
}

// The window of row r: with a negative number of drafts if it may not be staged, with
// none if it has no seat. And the rows before it that its shadow lacks.
std::pair<StagedWindow, int32_t> window_to_stage(const ShadowStageArgs& args,
                                                 int64_t r) {
  if (!args.saved.has_seat(r)) {
    return {};
  }
  StagedWindow window = find_window(args, r);
  if (window.num_drafts > 0 && !may_be_staged(args, r, window)) {
    window.num_drafts = -window.num_drafts;
  }
  if (window.num_drafts <= 0) {
    return {window, 0};
  }
  return {window, num_lacking(args, load_seat(args.saved.row(r)), window,
                              args.blocks.at(r, window.first_block))};
}

void save_window(const ShadowStageArgs& args, int64_t r) {
  if (!args.saved.has_seat(r)) {
    return;
  }
  const auto [window, num_copied] = window_to_stage(args, r);
  int32_t* saved = args.saved.row(r);
  if (window.num_drafts <= 0) {
    saved[kSavedDrafts] = left_alone(args, window.num_drafts);
    return;
  }
  save_window(saved, window, num_copied, args.step);
  for (int64_t i = 0; i < window.num_blocks; ++i) {
    const int64_t block = window.first_block + i;
    saved[kSavedEntries + i] = args.blocks.at(r, block);
    saved[kSavedEntries + args.saved.span + i] = args.shadow_entry(r, block);
  }
}

// The window of row r in `saved`; without drafts if it is not staged.
StagedWindow staged_window(const SavedWindows& windows, int64_t r) {
  StagedWindow window{};
  if (windows.has_seat(r)) {
    window = load_window(windows.row(r));
  }
  return window.num_drafts > 0 ? window : StagedWindow{};
}

// As staged_window; its entries are in range.
StagedWindow checked_window(const char* op, const SavedWindows& windows, int64_t r,
                            const BlockTable& blocks) {
  const StagedWindow window = staged_window(windows, r);
  if (window.num_drafts == 0) {
    return window;
  }
  NWOR_CHECK(window.num_blocks >= 1 && window.num_blocks <= windows.span &&
                 window.first_block >= 0 &&
                 window.first_block + window.num_blocks <= blocks.width &&
                 r < blocks.num_rows && window.first_row >= 0 &&
                 window.first_position >= 0 &&
                 window.seq_len > window.first_position + window.num_drafts &&
                 window.first_row + window.seq_len - window.first_position <=
                     blocks.num_slots_mapped,
             op, "saved[", r,
             "] names entries or rows beyond block_table or slot_mapping; must be of "
             "the same batch");
  return window;
}

template <typename Visit>  // visit(entry or slot, what it holds if staged, what was)
void for_each_patch(const BlockTable& blocks, const SavedWindows& windows, int64_t r,
                    const StagedWindow& window, int64_t tokens, const Visit& visit) {
  const int32_t* real = windows.row(r) + kSavedEntries;
  const int32_t* shadow = real + windows.span;
  for (int64_t i = 0; i < window.num_blocks; ++i) {
    visit(blocks.at(r, window.first_block + i), shadow[i], real[i]);
  }
  for (int64_t p = window.first_staged(tokens); p < window.seq_len; ++p) {
    visit(blocks.slot_mapping[window.first_row + (p - window.first_position)],
          slot_by_entries(window, shadow, p, tokens),
          slot_by_entries(window, real, p, tokens));
  }
}

void patch(const BlockTable& blocks, const SavedWindows& windows, int64_t r,
           const StagedWindow& window, int64_t tokens) {
  for_each_patch(blocks, windows, r, window, tokens,
                 [](auto& place, auto shadow, auto) { place = shadow; });
}

// Compare and restore.
void undo(const BlockTable& blocks, const SavedWindows& windows, int64_t r,
          const StagedWindow& window, int64_t tokens) {
  for_each_patch(blocks, windows, r, window, tokens,
                 [](auto& place, auto shadow, auto real) {
                   if (place == shadow) {
                     place = real;
                   }
                 });
}

}  // namespace

void stage_cpu(const ShadowStageArgs& args) {
  if (args.num_reqs == 0) {
    return;
  }
  const int64_t slot_bytes =
      check_table(kStage, args.table, args.runs, args.entry_tokens);
  check_batch(args);
  for (int64_t r = 0; args.patches && r < args.num_reqs; ++r) {
    const auto [window, num_copied] = window_to_stage(args, r);
    check_rows(kStage, args.table, args.runs, slot_bytes,
               window.first_position - num_copied, window.first_position);
  }
  for (int64_t r = 0; args.patches && r < args.num_reqs; ++r) {
    save_window(args, r);
  }
  std::vector<SlotRange> ranges;
  for (int64_t r = 0; r < args.num_reqs; ++r) {
    const StagedWindow window = checked_window(kStage, args.saved, r, args.blocks);
    if (window.num_drafts > 0) {
      const int64_t last = window.first_position;
      const int64_t first = last - args.saved.row(r)[kSavedCopiedRows];
      if (!args.patches) {
        check_rows(kStage, args.table, args.runs, slot_bytes, first, last);
      }
      add_rows(ranges, window, args.saved.row(r) + kSavedEntries, args.saved.span,
               first, last, args.entry_tokens, slots_together(args.table),
               Way::kToShadow);
    }
  }
  copy_all(args.table, args.runs, ranges);
  if (!args.patches) {
    return;
  }
  for (int64_t r = 0; r < args.num_reqs; ++r) {
    const StagedWindow window = staged_window(args.saved, r);
    if (window.num_drafts > 0) {
      patch(args.blocks, args.saved, r, window, args.entry_tokens);
    }
  }
}

void commit_draft_layer_cpu(const ShadowCommitArgs& args) {
  if (args.num_reqs == 0) {
    return;
  }
  const int64_t slot_bytes =
      check_table(kCommit, args.table, args.runs, args.entry_tokens);
  check_seats(kCommit, args.saved, args.num_reqs);
  std::vector<SlotRange> ranges;
  int64_t counts[kNumCounters] = {};
  for (int64_t r = 0; r < args.num_reqs; ++r) {
    if (!args.saved.has_seat(r)) {
      continue;
    }
    const int32_t* saved = args.saved.row(r);
    const int64_t num_drafts = std::abs(saved[kSavedDrafts]);
    if (num_drafts == 0) {
      continue;
    }
    const int64_t accepted =
        clamp_accepted(num_accepted(args.acceptance, r, num_drafts), num_drafts);
    counts[kWindows] += 1;
    counts[kStaged] += num_drafts;
    counts[kCommitted] += accepted;
    counts[kRejected] += num_drafts - accepted;
    const StagedWindow window = checked_window(kCommit, args.saved, r, args.blocks);
    if (window.num_drafts == 0) {
      counts[kInvalidSlots] += num_drafts;
      continue;
    }
    counts[kShadowWindows] += 1;
    const int64_t first = window.first_staged(args.entry_tokens);
    const int64_t last = window.first_draft() + accepted;
    check_rows(kCommit, args.table, args.runs, slot_bytes, first, last);
    add_rows(ranges, window, saved + kSavedEntries, args.saved.span, first, last,
             args.entry_tokens, slots_together(args.table), Way::kToReal);
    counts[kShadowCopiedBytes] += saved[kSavedCopiedRows] * slot_bytes;
    counts[kCommittedBytes] += std::max<int64_t>(0, last - first) * slot_bytes;
  }
  copy_all(args.table, args.runs, ranges);
  for (int64_t r = 0; args.undoes && r < args.num_reqs; ++r) {
    const StagedWindow window = staged_window(args.saved, r);
    if (window.num_drafts > 0) {
      const int64_t accepted = num_accepted(args.acceptance, r, window.num_drafts);
      save_valid(args.saved.row(r), window, clamp_accepted(accepted, window.num_drafts),
                 args.entry_tokens);
      undo(args.blocks, args.saved, r, window, args.entry_tokens);
    }
  }
  for (int i = 0; i < kNumCounters; ++i) {
    args.counters[i] += counts[i];
    if (args.counters_to != nullptr) {
      args.counters_to[i] = args.counters[i];
    }
  }
}

void unstage_cpu(const ShadowUndoArgs& args) {
  check_seats(kUnstage, args.saved, args.num_reqs);
  for (int64_t r = 0; r < args.num_reqs; ++r) {
    checked_window(kUnstage, args.saved, r, args.blocks);
  }
  for (int64_t r = 0; r < args.num_reqs; ++r) {
    const StagedWindow window = staged_window(args.saved, r);
    if (window.num_drafts > 0) {
      undo(args.blocks, args.saved, r, window, args.entry_tokens);
    }
  }
}

}  // namespace nwor
