// SPDX-License-Identifier: Apache-2.0
//
// The CPU copies between a layer's cache and the undo log: the readable
// specification of what the CUDA kernels do. Byte copies, blind to the dtype;
// no address needs to be aligned. Nothing is checked here (see cow_cpu.cpp).
//
// Drafts come in tiles. Within a tile, drafts that share a block are walked run
// by run, not draft by draft: in a column-major layout (CPU_ATTN's K) the same
// run of neighbouring slots lies in one cache line.
#pragma once

#include <cstring>

#include "common/table.h"

namespace nwor {

constexpr int64_t kTileDrafts = 16;

// How many runs ahead cache lines are fetched: the strides of a packed layout are
// too irregular for the hardware prefetcher. Measured with column-major K.
constexpr int64_t kPrefetchRuns = 16;

// Drafts of one tile, to be copied.
struct DraftTile {
  int64_t drafts[kTileDrafts];
  int64_t slots[kTileDrafts];
  int64_t count = 0;

  void add(int64_t draft, int64_t slot) {
    drafts[count] = draft;
    slots[count] = slot;
    ++count;
  }
};

// Small lengths get a copy of constant size: packed layouts consist of them.
inline void copy_bytes(uint8_t* target, const uint8_t* source, int64_t length) {
  switch (length) {
    case 1:
      *target = *source;
      return;
    case 2:
      std::memcpy(target, source, 2);
      return;
    case 4:
      std::memcpy(target, source, 4);
      return;
    case 8:
      std::memcpy(target, source, 8);
      return;
    case 16:
      std::memcpy(target, source, 16);
      return;
    default:
      std::memcpy(target, source, static_cast<size_t>(length));
  }
}

template <Direction kDirection>
inline void copy_run(uint8_t* cache, uint8_t* log, int64_t length) {
  if (kDirection == Direction::kToLog) {
    copy_bytes(log, cache, length);
  } else {
    copy_bytes(cache, log, length);
  }
}

// Row layout: head h of a slot is one run, run_bytes long.
template <Direction kDirection>
void copy_rows(const LayerRow& layer, const UndoLog& log, const DraftTile& tile) {
  uint8_t* base = reinterpret_cast<uint8_t*>(layer.base);
  for (int64_t i = 0; i < tile.count; ++i) {
    uint8_t* cache = base + layer.slot_offset(tile.slots[i]);
    uint8_t* saved = log.row(tile.drafts[i]) + layer.log_offset;
    for (int64_t head = 0; head < layer.num_heads; ++head) {
      copy_run<kDirection>(cache + head * layer.head_stride,
                           saved + head * layer.run_bytes, layer.run_bytes);
    }
  }
}

// Packed layout, drafts [first, last) of the tile, all in the same block.
template <Direction kDirection>
void copy_packed_block(const LayerRow& layer, const RunList& runs, const UndoLog& log,
                       const DraftTile& tile, int64_t first, int64_t last) {
  uint8_t* block =
      reinterpret_cast<uint8_t*>(layer.base) + layer.block_offset(tile.slots[first]);
  const int32_t* run[kTileDrafts];
  uint8_t* saved[kTileDrafts];
  const int64_t count = last - first;
  for (int64_t i = 0; i < count; ++i) {
    run[i] = runs.of(tile.slots[first + i] % runs.block_size);
    saved[i] = log.row(tile.drafts[first + i]) + layer.log_offset;
  }
  for (int64_t j = 0; j < runs.num_runs; ++j) {
    if (j + kPrefetchRuns < runs.num_runs) {
      __builtin_prefetch(block + run[0][2 * (j + kPrefetchRuns)],
                         kDirection == Direction::kToCache);
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t offset = run[i][2 * j];
      const int64_t length = run[i][2 * j + 1];
      copy_run<kDirection>(block + offset, saved[i], length);
      saved[i] += length;
    }
  }
}

template <Direction kDirection>
void copy_packed(const LayerRow& layer, const RunList& runs, const UndoLog& log,
                 const DraftTile& tile) {
  int64_t first = 0;
  while (first < tile.count) {
    const int64_t block = tile.slots[first] / runs.block_size;
    int64_t last = first + 1;
    while (last < tile.count && tile.slots[last] / runs.block_size == block) {
      ++last;
    }
    copy_packed_block<kDirection>(layer, runs, log, tile, first, last);
    first = last;
  }
}

}  // namespace nwor
