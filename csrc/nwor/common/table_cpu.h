// SPDX-License-Identifier: Apache-2.0
//
// What the CPU launchers check of a layer table and of a packed layout's runs.
// That a layer's base address and strides stay within its allocation cannot be
// checked here: the builder of the table guarantees it.
#pragma once

#include <algorithm>

#include "common/check.h"
#include "common/table.h"

namespace nwor {

// Work of one thread at least; unit: runs, or 64 bytes. About 150 us: less is not worth
// a barrier, which takes milliseconds where the cores are shared with other processes.
constexpr int64_t kCostPerThread = 32768;

inline void check_layers(const char* op, const LayerTable& table, const RunList& runs) {
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
  }
}

// Bytes of a slot of this packed layout; the runs of `slot` are checked.
inline int64_t check_runs(const char* op, const LayerTable& table, const RunList& runs,
                          int64_t slot) {
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
    NWOR_CHECK(end <= table.rows[i].block_stride, op, "runs[", offset_in_block,
               "] end at byte ", end, "; must lie in a block of table row ", i,
               ", block_stride ", table.rows[i].block_stride);
  }
  return total;
}

// Cost of a slot in one layer, in runs or units of 64 bytes.
inline int64_t slot_cost(const LayerTable& table, const RunList& runs) {
  const LayerRow& layer = table.rows[0];
  return std::max<int64_t>(1, runs.data != nullptr
                                  ? runs.num_runs
                                  : layer.num_heads * (1 + layer.run_bytes / 64));
}

}  // namespace nwor
