// SPDX-License-Identifier: Apache-2.0
//
// CPU launchers of log_cache_slots and restore_rejected_drafts: check every
// value, then write. The copies themselves are in copy_cpu.h.
#include <algorithm>

#include "common/check.h"
#include "common/copy_cpu.h"
#include "common/parallel.h"
#include "common/table_cpu.h"
#include "transaction/cow.h"

namespace nwor {
namespace {

// The cumulative sum is one of 1 + k rows a request, within logits_indices, and
// its drafts fit into num_drafts.
void check_windows(const char* op, const BatchWindows& batch, int64_t num_drafts) {
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
void write_windows(const char* op, const BatchWindows& batch, int64_t* log_slots,
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

bool is_draft(const int32_t* log_windows, int64_t draft) {
  return log_windows[3 * draft] >= 0;
}

// Requires that the draft's window was checked.
bool is_accepted(const int32_t* log_windows, int64_t draft,
                 const Acceptance& acceptance) {
  const int32_t* window = log_windows + 3 * draft;
  return window[1] < num_accepted(acceptance, window[0], window[2]);
}

// The window that a log keeps for `draft` can be looked up in the acceptance.
void check_logged_window(const char* op, const int32_t* log_windows, int64_t draft,
                         const Acceptance& acceptance) {
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

void check_table(const char* op, const LayerTable& table, const RunList& runs,
                 const UndoLog& log) {
  check_layers(op, table, runs);
  for (int64_t i = 0; i < table.num_layers; ++i) {
    const LayerRow& layer = table.rows[i];
    NWOR_CHECK(layer.log_offset >= 0 && layer.log_offset <= log.row_bytes, op,
               "table row ", i, ": log_offset is ", layer.log_offset,
               "; must be between 0 and the ", log.row_bytes,
               " bytes of a row of undo_log");
    NWOR_CHECK(
        runs.data != nullptr ||
            layer.num_heads <= (log.row_bytes - layer.log_offset) / layer.run_bytes,
        op, "table row ", i, ": ", layer.num_heads, " heads of ", layer.run_bytes,
        " bytes at log_offset ", layer.log_offset, " do not fit a row of undo_log of ",
        log.row_bytes, " bytes");
  }
}

void check_slot(const char* op, const LayerTable& table, int64_t draft, int64_t slot) {
  const int64_t num_slots = table.rows[0].num_slots();
  NWOR_CHECK(slot >= kPadSlot && slot < num_slots, op, "slot of draft ", draft, " is ",
             slot, "; must be -1 (padding) or between 0 and ", num_slots - 1);
}

// Bytes of one draft in this packed layout; the runs of its slot are checked.
int64_t check_logged_runs(const char* op, const LayerTable& table, const RunList& runs,
                          const UndoLog& log, int64_t slot) {
  const int64_t total = check_runs(op, table, runs, slot);
  for (int64_t i = 0; i < table.num_layers; ++i) {
    const LayerRow& layer = table.rows[i];
    NWOR_CHECK(total <= log.row_bytes - layer.log_offset, op, "runs[",
               slot % runs.block_size, "] are ", total, " bytes long; at log_offset ",
               layer.log_offset, " of table row ", i,
               " they do not fit a row of undo_log of ", log.row_bytes, " bytes");
  }
  return total;
}

// Copies the drafts for which slot_to_copy(draft) >= 0, in all layers.
template <Direction kDirection, typename SlotToCopy>
void copy_all(const LayerTable& table, const RunList& runs, const UndoLog& log,
              int64_t num_drafts, const SlotToCopy& slot_to_copy) {
  const int64_t num_tiles = (num_drafts + kTileDrafts - 1) / kTileDrafts;
  const int64_t grain = std::max<int64_t>(
      1, kCostPerThread / (slot_cost(table, runs) * std::min(num_drafts, kTileDrafts)));
  // Layers are innermost: the run lists of a tile's slots stay in the cache.
  parallel_for(num_tiles * table.num_layers, grain, [&](int64_t begin, int64_t end) {
    int64_t tile_index = -1;
    DraftTile tile;
    for (int64_t item = begin; item < end; ++item) {
      if (item / table.num_layers != tile_index) {
        tile_index = item / table.num_layers;
        tile.count = 0;
        const int64_t first = tile_index * kTileDrafts;
        const int64_t last = std::min(first + kTileDrafts, num_drafts);
        for (int64_t draft = first; draft < last; ++draft) {
          const int64_t slot = slot_to_copy(draft);
          if (slot >= 0) {
            tile.add(draft, slot);
          }
        }
      }
      const LayerRow& layer = table.rows[item % table.num_layers];
      if (runs.data != nullptr) {
        copy_packed<kDirection>(layer, runs, log, tile);
      } else {
        copy_rows<kDirection>(layer, log, tile);
      }
    }
  });
}

}  // namespace

void log_cache_slots_cpu(const LogArgs& args) {
  if (args.num_drafts == 0) {
    return;
  }
  check_table(kLog, args.table, args.runs, args.log);
  check_windows(kLog, args.batch, args.num_drafts);
  int64_t first_draft = -1;
  int64_t bytes_per_slot = 0;
  for_each_draft(kLog, args.batch, [&](int64_t draft, const DraftPlace&, int64_t slot) {
    check_slot(kLog, args.table, draft, slot);
    if (args.runs.data == nullptr || slot < 0 || slot >= args.first_shadow_slot) {
      return;
    }
    const int64_t bytes =
        check_logged_runs(kLog, args.table, args.runs, args.log, slot);
    if (first_draft < 0) {
      first_draft = draft;
      bytes_per_slot = bytes;
    }
    NWOR_CHECK(bytes == bytes_per_slot, kLog, "runs of draft ", draft, "'s slot ", slot,
               " are ", bytes, " bytes long; must be ", bytes_per_slot,
               ", as for draft ", first_draft);
  });

  write_windows(kLog, args.batch, args.log.slots, args.log.windows, args.num_drafts,
                args.first_shadow_slot);
  copy_all<Direction::kToLog>(args.table, args.runs, args.log, args.num_drafts,
                              [&](int64_t draft) { return args.log.slots[draft]; });
}

void restore_rejected_drafts_cpu(const RestoreArgs& args) {
  if (args.num_drafts == 0) {
    return;
  }
  const UndoLog& log = args.log;
  check_table(kRestore, args.table, args.runs, log);
  int64_t packed_bytes = 0;
  for (int64_t draft = 0; draft < args.num_drafts; ++draft) {
    check_logged_window(kRestore, log.windows, draft, args.acceptance);
    if (log.slots[draft] == kInvalidSlot) {
      continue;
    }
    check_slot(kRestore, args.table, draft, log.slots[draft]);
    if (args.runs.data != nullptr && log.slots[draft] >= 0) {
      packed_bytes =
          check_logged_runs(kRestore, args.table, args.runs, log, log.slots[draft]);
    }
  }

  int64_t bytes_per_draft = 0;
  for (int64_t i = 0; i < args.table.num_layers; ++i) {
    const LayerRow& layer = args.table.rows[i];
    bytes_per_draft +=
        args.runs.data != nullptr ? packed_bytes : layer.num_heads * layer.run_bytes;
  }
  const auto is_rejected = [&](int64_t draft) {
    return is_draft(log.windows, draft) &&
           !is_accepted(log.windows, draft, args.acceptance);
  };
  copy_all<Direction::kToCache>(
      args.table, args.runs, log, args.num_drafts,
      [&](int64_t draft) { return is_rejected(draft) ? log.slots[draft] : kPadSlot; });
  for (int64_t draft = 0; draft < args.num_drafts; ++draft) {
    args.counters[kInvalidSlots] += log.slots[draft] == kInvalidSlot;
    if (!is_draft(log.windows, draft)) {
      continue;
    }
    const bool rejected = is_rejected(draft);
    args.counters[kWindows] += log.windows[3 * draft + 1] == 0;
    args.counters[kStaged] += 1;
    args.counters[kCommitted] += !rejected;
    args.counters[kRejected] += rejected;
    if (rejected && log.slots[draft] >= 0) {
      args.counters[kRestoredBytes] += bytes_per_draft;
    }
  }
  if (args.counters_to != nullptr) {
    std::copy_n(args.counters, static_cast<int>(kNumCounters), args.counters_to);
  }
}

}  // namespace nwor
