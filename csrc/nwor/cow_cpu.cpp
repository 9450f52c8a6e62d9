// SPDX-License-Identifier: Apache-2.0
//
// CPU launchers of log_cache_slots and restore_rejected_drafts: check every
// value, then write. The copies themselves are in copy_cpu.h.
//
// What cannot be checked here: that a layer's base address and strides stay
// within its allocation. Whoever builds the table answers for that.
#include <algorithm>

#include "check.h"
#include "copy_cpu.h"
#include "launch.h"
#include "parallel.h"
#include "windows_cpu.h"

namespace nwor {
namespace {

constexpr const char* kLog = "log_cache_slots";
constexpr const char* kRestore = "restore_rejected_drafts";

// Work of one thread at least; unit: runs, or 64 bytes. About 150 us: less is not worth
// a barrier, which takes milliseconds where the cores are shared with other processes.
constexpr int64_t kCostPerThread = 32768;

void check_table(const char* op, const LayerTable& table, const RunList& runs,
                 const UndoLog& log) {
  const int64_t num_slots = table.rows[0].num_slots();
  for (int64_t i = 0; i < table.num_layers; ++i) {
    const LayerRow& layer = table.rows[i];
    NWOR_CHECK(layer.base != 0, op, "table row ", i,
               ": base is 0; must be the address of the layer's cache");
    NWOR_CHECK(layer.block_size > 0, op, "table row ", i, ": block_size is ",
               layer.block_size, "; must be at least 1");
    NWOR_CHECK(layer.num_blocks > 0, op, "table row ", i, ": num_blocks is ",
               layer.num_blocks, "; must be at least 1");
    NWOR_CHECK(layer.num_slots() == num_slots, op, "table row ", i, ": has ",
               layer.num_slots(), " slots; must have ", num_slots,
               ", as many as row 0");
    NWOR_CHECK(layer.log_offset >= 0 && layer.log_offset <= log.row_bytes, op,
               "table row ", i, ": log_offset is ", layer.log_offset,
               "; must be between 0 and the ", log.row_bytes,
               " bytes of a row of undo_log");
    if (runs.data != nullptr) {
      NWOR_CHECK(layer.block_size == runs.block_size, op, "table row ", i,
                 ": block_size is ", layer.block_size, "; must be ", runs.block_size,
                 ", as in runs");
      continue;
    }
    NWOR_CHECK(layer.num_heads > 0, op, "table row ", i, ": num_heads is ",
               layer.num_heads, "; must be at least 1");
    NWOR_CHECK(layer.run_bytes > 0, op, "table row ", i, ": run_bytes is ",
               layer.run_bytes, "; must be at least 1");
    NWOR_CHECK(layer.num_heads <= (log.row_bytes - layer.log_offset) / layer.run_bytes,
               op, "table row ", i, ": ", layer.num_heads, " heads of ",
               layer.run_bytes, " bytes at log_offset ", layer.log_offset,
               " do not fit a row of undo_log of ", log.row_bytes, " bytes");
  }
}

void check_slot(const char* op, const LayerTable& table, int64_t draft, int64_t slot) {
  const int64_t num_slots = table.rows[0].num_slots();
  NWOR_CHECK(slot >= kPadSlot && slot < num_slots, op, "slot of draft ", draft, " is ",
             slot, "; must be -1 (padding) or between 0 and ", num_slots - 1);
}

// Bytes of one draft in this packed layout; the runs of its slot are checked.
int64_t check_runs(const char* op, const LayerTable& table, const RunList& runs,
                   const UndoLog& log, int64_t slot) {
  const int64_t offset_in_block = slot % runs.block_size;
  const int32_t* run = runs.of(offset_in_block);
  int64_t total = 0;
  int64_t end = 0;
  for (int64_t j = 0; j < runs.num_runs; ++j) {
    const int64_t offset = run[2 * j];
    const int64_t length = run[2 * j + 1];
    NWOR_CHECK(offset >= 0 && length >= 0, op, "runs[", offset_in_block, "][", j,
               "] is (", offset, ", ", length,
               "); offset and length must not be negative");
    end = std::max(end, offset + length);
    total += length;
  }
  for (int64_t i = 0; i < table.num_layers; ++i) {
    const LayerRow& layer = table.rows[i];
    NWOR_CHECK(end <= layer.block_stride, op, "runs[", offset_in_block,
               "] end at byte ", end, "; must lie in a block of table row ", i,
               ", block_stride ", layer.block_stride);
    NWOR_CHECK(total <= log.row_bytes - layer.log_offset, op, "runs[", offset_in_block,
               "] are ", total, " bytes long; at log_offset ", layer.log_offset,
               " of table row ", i, " they do not fit a row of undo_log of ",
               log.row_bytes, " bytes");
  }
  return total;
}

// Cost of a tile of drafts in one layer, in runs or units of 64 bytes.
int64_t tile_cost(const LayerTable& table, const RunList& runs, int64_t num_drafts) {
  const LayerRow& layer = table.rows[0];
  const int64_t of_draft = runs.data != nullptr
                               ? runs.num_runs
                               : layer.num_heads * (1 + layer.run_bytes / 64);
  return std::max<int64_t>(1, of_draft * std::min(num_drafts, kTileDrafts));
}

// Copies the drafts for which slot_to_copy(draft) >= 0, in all layers.
template <Direction kDirection, typename SlotToCopy>
void copy_all(const LayerTable& table, const RunList& runs, const UndoLog& log,
              int64_t num_drafts, const SlotToCopy& slot_to_copy) {
  const int64_t num_tiles = (num_drafts + kTileDrafts - 1) / kTileDrafts;
  const int64_t grain =
      std::max<int64_t>(1, kCostPerThread / tile_cost(table, runs, num_drafts));
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
    if (args.runs.data == nullptr || slot < 0) {
      return;
    }
    const int64_t bytes = check_runs(kLog, args.table, args.runs, args.log, slot);
    if (first_draft < 0) {
      first_draft = draft;
      bytes_per_slot = bytes;
    }
    NWOR_CHECK(bytes == bytes_per_slot, kLog, "runs of draft ", draft, "'s slot ", slot,
               " are ", bytes, " bytes long; must be ", bytes_per_slot,
               ", as for draft ", first_draft);
  });

  write_windows(kLog, args.batch, args.log.slots, args.log.windows, args.num_drafts);
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
      packed_bytes = check_runs(kRestore, args.table, args.runs, log, log.slots[draft]);
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
