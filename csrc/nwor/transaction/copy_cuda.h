// SPDX-License-Identifier: Apache-2.0
//
// Device code of log and restore: the work of one thread block, which is one draft in
// up to 32 layers. Row layouts only.
//
// The first warp turns each layer into a CopyJob in shared memory: where the bytes are
// and how wide they may be accessed. Then all warps walk the jobs' chunks in turn. A
// chunk is kUnroll pieces for each lane, loaded before the first is stored, so that
// each warp has kUnroll * 512 bytes in flight.
#pragma once

#include "common/cuda_support.h"
#include "common/table.h"

namespace nwor {

constexpr int kMaxLayersPerBlock = kWarpThreads;  // one lane prepares one layer
// What the registers allow: 72 a thread. 56 KB in flight on each multiprocessor.
constexpr int kBlocksPerMultiprocessor = 7;
constexpr uint32_t kUnroll = 4;
constexpr uint32_t kChunkPieces = kUnroll * kWarpThreads;

// One draft's bytes in one layer.
struct CopyJob {
  uint8_t* cache;  // head 0 of the slot
  uint8_t* saved;  // head 0 in the undo log
  int64_t head_stride;
  uint32_t run_bytes;
  uint32_t num_heads;
  uint32_t width;       // bytes of an access
  uint32_t num_chunks;  // 0: nothing to copy
  uint32_t step_heads;  // kWarpThreads pieces further, in whole runs
  uint32_t step_pieces;
};

__device__ inline CopyJob make_job(const LayerRow& layer, const UndoLog& log,
                                   int64_t draft, int64_t slot) {
  CopyJob job;
  job.cache = reinterpret_cast<uint8_t*>(layer.base) + layer.slot_offset(slot);
  job.saved = log.row(draft) + layer.log_offset;
  job.head_stride = layer.head_stride;
  job.run_bytes = static_cast<uint32_t>(layer.run_bytes);
  job.num_heads = static_cast<uint32_t>(layer.num_heads);
  job.width = widest_access(reinterpret_cast<uint64_t>(job.cache) |
                            reinterpret_cast<uint64_t>(job.saved) | layer.run_bytes |
                            (layer.num_heads > 1 ? layer.head_stride : 0));
  const uint32_t pieces_per_run = job.run_bytes / job.width;
  const uint32_t num_pieces = pieces_per_run * job.num_heads;
  job.step_heads = kWarpThreads / pieces_per_run;
  job.step_pieces = kWarpThreads % pieces_per_run;
  // A table whose layers have fewer slots than its first: leave the layer alone.
  job.num_chunks =
      slot < layer.num_slots() ? (num_pieces + kChunkPieces - 1) / kChunkPieces : 0;
  return job;
}

template <Direction kDirection, int kBytes>
__device__ void copy_chunk(const CopyJob& job, uint32_t chunk, uint32_t lane) {
  using Piece = typename PieceOf<kBytes>::type;
  const uint32_t pieces_per_run = job.run_bytes / kBytes;
  const uint32_t num_pieces = pieces_per_run * job.num_heads;
  const uint32_t first = chunk * kChunkPieces + lane;
  Piece* const saved = reinterpret_cast<Piece*>(job.saved) + first;
  // A lane's pieces are kWarpThreads apart: divide once, then step.
  uint32_t head = first / pieces_per_run;
  uint32_t piece = first - head * pieces_per_run;
  Piece* cache[kUnroll];
#pragma unroll
  for (uint32_t u = 0; u < kUnroll; ++u) {
    cache[u] = reinterpret_cast<Piece*>(job.cache + head * job.head_stride) + piece;
    head += job.step_heads;
    piece += job.step_pieces;
    if (piece >= pieces_per_run) {
      piece -= pieces_per_run;
      ++head;
    }
  }

  // The intrinsics say to the compiler, which sees addresses from a table, that this is
  // device memory. No byte is read twice: loads keep out of L1.
  Piece values[kUnroll];
#pragma unroll
  for (uint32_t u = 0; u < kUnroll; ++u) {
    if (first + u * kWarpThreads < num_pieces) {
      values[u] =
          __ldcg(kDirection == Direction::kToLog ? cache[u] : saved + u * kWarpThreads);
    }
  }
#pragma unroll
  for (uint32_t u = 0; u < kUnroll; ++u) {
    if (first + u * kWarpThreads < num_pieces) {
      __stwb(kDirection == Direction::kToLog ? saved + u * kWarpThreads : cache[u],
             values[u]);
    }
  }
}

// All warps of the block: chunk c of the jobs, counted on, goes to warp c % warps.
template <Direction kDirection>
__device__ void copy_jobs(const CopyJob* jobs, int num_jobs) {
  const uint32_t lane = threadIdx.x % kWarpThreads;
  uint32_t chunk = threadIdx.x / kWarpThreads;
  for (int j = 0; j < num_jobs; ++j) {
    const CopyJob job = jobs[j];
    for (; chunk < job.num_chunks; chunk += kBlockThreads / kWarpThreads) {
      switch (job.width) {
        case 16:
          copy_chunk<kDirection, 16>(job, chunk, lane);
          break;
        case 8:
          copy_chunk<kDirection, 8>(job, chunk, lane);
          break;
        case 4:
          copy_chunk<kDirection, 4>(job, chunk, lane);
          break;
        case 2:
          copy_chunk<kDirection, 2>(job, chunk, lane);
          break;
        default:
          copy_chunk<kDirection, 1>(job, chunk, lane);
      }
    }
    chunk -= job.num_chunks;
  }
}

// How the layers are shared among the blocks of a draft.
struct LayerSplit {
  int layers_per_block;
  int blocks_per_draft;
};

// Few drafts: one layer a block, to use many multiprocessors. Many: up to 32 KB a
// block, so that finding the draft's place is paid for by what is copied, and still
// several blocks for each multiprocessor.
inline LayerSplit split_layers(int64_t num_drafts, int64_t num_layers,
                               int64_t log_row_bytes, int num_multiprocessors) {
  constexpr int64_t kMinBlockBytes = 2 << 10;
  constexpr int64_t kMaxBlockBytes = 32 << 10;
  int64_t block_bytes =
      num_drafts * log_row_bytes / (num_multiprocessors * kBlocksPerMultiprocessor);
  block_bytes = block_bytes < kMinBlockBytes ? kMinBlockBytes : block_bytes;
  block_bytes = block_bytes > kMaxBlockBytes ? kMaxBlockBytes : block_bytes;
  const int64_t layer_bytes = log_row_bytes / num_layers + 1;
  int64_t layers = block_bytes / layer_bytes;
  layers = layers > num_layers ? num_layers : layers;
  layers = layers > kMaxLayersPerBlock ? kMaxLayersPerBlock : layers;
  layers = layers < 1 ? 1 : layers;
  return {static_cast<int>(layers),
          static_cast<int>((num_layers + layers - 1) / layers)};
}

}  // namespace nwor
