// SPDX-License-Identifier: Apache-2.0
//
// Where the bytes of one cache slot lie: the rows of a layer table, the run
// list of a packed layout, and the undo log. Shared by CPU and CUDA code; knows
// nothing about torch and copies nothing.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define NWOR_HOST_DEVICE __host__ __device__
#else
#define NWOR_HOST_DEVICE
#endif

namespace nwor {

// log_slots entries that are not a slot.
constexpr int64_t kPadSlot = -1;      // padding, or not a draft
constexpr int64_t kInvalidSlot = -2;  // CUDA only: refused on the device

// One row of the table: int64 [num_layers, 9], all strides in bytes.
struct LayerRow {
  int64_t base;          // address of the layer's first byte
  int64_t block_stride;  // from a block to the next
  int64_t slot_stride;   // from a slot to the next in its block; row layouts
  int64_t head_stride;   // from a head to the next; row layouts
  int64_t num_heads;     // runs of a slot; row layouts
  int64_t run_bytes;     // length of each run; row layouts
  int64_t block_size;    // slots in a block
  int64_t num_blocks;
  int64_t log_offset;  // of this layer's bytes in a row of the undo log

  NWOR_HOST_DEVICE int64_t num_slots() const { return num_blocks * block_size; }

  // Offset from base of the block that holds `slot`.
  NWOR_HOST_DEVICE int64_t block_offset(int64_t slot) const {
    return slot / block_size * block_stride;
  }

  // Offset from base of head 0 of `slot`. With 16 slots a block, block_stride
  // 4096 and slot_stride 128, slot 35 is slot 3 of block 2:
  // 2 * 4096 + 3 * 128 = 8576.
  NWOR_HOST_DEVICE int64_t slot_offset(int64_t slot) const {
    return block_offset(slot) + slot % block_size * slot_stride;
  }
};
constexpr int64_t kNumTableColumns = 9;
static_assert(sizeof(LayerRow) == kNumTableColumns * sizeof(int64_t),
              "a LayerRow is a row of the table");

struct LayerTable {
  const LayerRow* rows;
  int64_t num_layers;
};

// Packed layouts: int32 [block_size, num_runs, 2], (offset in block, length).
// data == nullptr says that the table's rows describe a row layout.
struct RunList {
  const int32_t* data;
  int64_t block_size;
  int64_t num_runs;

  // The runs of the slot at `offset` in its block, as (offset, length) pairs.
  const int32_t* of(int64_t offset) const { return data + offset * num_runs * 2; }
};

// The saved bytes, draft-major, and for each draft its slot and its window.
struct UndoLog {
  uint8_t* bytes;      // [capacity, row_bytes]
  int64_t row_stride;  // bytes from a row to the next
  int64_t row_bytes;   // bytes of a row that may be used
  int64_t capacity;    // rows
  int64_t* slots;      // [capacity]
  int32_t* windows;    // [capacity, 3]: request, position, number of drafts

  NWOR_HOST_DEVICE uint8_t* row(int64_t draft) const {
    return bytes + draft * row_stride;
  }
};

enum class Direction { kToLog, kToCache };

// Where a step's commit may write what the counters have become: int64 [num_slots, 9]
// in host memory, rows may be strided.
struct CounterRing {
  int64_t* first;
  int64_t num_slots;
  int64_t stride;  // in elements

  int64_t* at(int64_t slot) const { return first + slot * stride; }
};

// Columns of a row of counters, int64 [9]. Ops add to it.
enum Counter : int {
  kWindows,
  kStaged,
  kCommitted,
  kRejected,
  kShadowWindows,
  kRestoredBytes,
  kInvalidSlots,
  kShadowCopiedBytes,
  kCommittedBytes,
  kNumCounters,
};

}  // namespace nwor
