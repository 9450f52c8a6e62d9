// SPDX-License-Identifier: Apache-2.0
//
// CUDA kernels and launchers of log_cache_slots and restore_rejected_drafts: one launch
// for all layers and drafts of a table. Row layouts only. The grid follows from what
// the host knows (num_drafts, an upper bound, and the shapes); everything else is read
// on the device.
//
// A thread block does one draft in up to 32 layers. Its first warp turns each layer
// into a CopyJob in shared memory: where the bytes are and how wide they may be
// accessed. Then all warps walk the jobs' chunks in turn. A chunk is kUnroll pieces for
// each lane, loaded before the first is stored, so that each warp has kUnroll * 512
// bytes in flight.
#include "common/cuda_support.h"
#include "common/driver_launch.h"
#include "common/windows_cuda.h"
#include "transaction/cow.h"

namespace nwor {
namespace {

// --- copies -------------------------------------------------------------------------

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

__device__ CopyJob make_job(const LayerRow& layer, const UndoLog& log, int64_t draft,
                            int64_t slot) {
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
  // A layer with fewer slots than the table's first one: skip it.
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
// block, to amortize finding the draft's place, and still several blocks for each
// multiprocessor.
LayerSplit split_layers(int64_t num_drafts, int64_t num_layers, int64_t log_row_bytes,
                        int num_multiprocessors) {
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

// --- kernels ------------------------------------------------------------------------

// First warp: jobs of layers [first_layer, first_layer + layers_per_block) for a slot.
__device__ int prepare_jobs(CopyJob* jobs, const LayerTable& table, const UndoLog& log,
                            int first_layer, int layers_per_block, int64_t draft,
                            int64_t slot) {
  const int remaining = static_cast<int>(table.num_layers) - first_layer;
  const int num_jobs = remaining < layers_per_block ? remaining : layers_per_block;
  const int lane = threadIdx.x % kWarpThreads;
  if (lane < num_jobs) {
    jobs[lane] = make_job(table.rows[first_layer + lane], log, draft, slot);
  }
  return num_jobs;
}

__global__ void __launch_bounds__(kBlockThreads, kBlocksPerMultiprocessor)
    log_kernel(const __grid_constant__ LogArgs args,
               const __grid_constant__ LayerSplit split) {
  wait_for_stream();
  __shared__ CopyJob jobs[kMaxLayersPerBlock];
  __shared__ int num_jobs;
  const int64_t draft = blockIdx.x / split.blocks_per_draft;
  const int part = static_cast<int>(blockIdx.x % split.blocks_per_draft);
  if (threadIdx.x < kWarpThreads) {
    DraftPlace place = find_draft_by_warp(args.batch, draft);
    int64_t slot = slot_of(args.batch, place, args.table.rows[0].num_slots());
    if (slot >= args.first_shadow_slot) {
      place = no_draft();
      slot = kPadSlot;
    }
    int count = 0;
    if (slot >= 0) {
      count = prepare_jobs(jobs, args.table, args.log, part * split.layers_per_block,
                           split.layers_per_block, draft, slot);
    }
    if (threadIdx.x == 0) {
      num_jobs = count;
      if (part == 0) {
        write_log_entry(args.log.slots, args.log.windows, draft, place, slot);
      }
    }
  }
  __syncthreads();
  copy_jobs<Direction::kToLog>(jobs, num_jobs);
}

// What a draft adds to the counters.
__device__ void count_draft(const RestoreArgs& args, int64_t draft, unsigned* counts) {
  const int32_t* window = args.log.windows + 3 * draft;
  const int64_t slot = args.log.slots[draft];
  const bool is_known = window[0] < args.acceptance.num_reqs;
  counts[kInvalidSlots] += slot == kInvalidSlot || !is_known;
  if (window[0] < 0 || !is_known) {
    return;
  }
  const bool is_rejected =
      window[1] >= num_accepted(args.acceptance, window[0], window[2]);
  counts[kWindows] += window[1] == 0;
  counts[kStaged] += 1;
  counts[kCommitted] += !is_rejected;
  counts[kRejected] += is_rejected;
  counts[kRestoredBytes] += is_rejected && slot >= 0;
}

__global__ void __launch_bounds__(kBlockThreads, kBlocksPerMultiprocessor)
    restore_kernel(const __grid_constant__ RestoreArgs args,
                   const __grid_constant__ LayerSplit split) {
  wait_for_stream();
  __shared__ CopyJob jobs[kMaxLayersPerBlock];
  __shared__ int num_jobs;
  if (blockIdx.x == 0) {
    count_windows(args.table, args.counters, args.counters_to, [&](unsigned* counts) {
#pragma unroll 1
      for (int64_t draft = threadIdx.x; draft < args.num_drafts;
           draft += kBlockThreads) {
        count_draft(args, draft, counts);
      }
    });
    return;
  }
  const int64_t block = blockIdx.x - 1;
  const int64_t draft = block / split.blocks_per_draft;
  const int part = static_cast<int>(block % split.blocks_per_draft);
  if (threadIdx.x < kWarpThreads) {
    const int64_t slot = args.log.slots[draft];
    const int32_t* window = args.log.windows + 3 * draft;
    const int64_t request = window[0];
    int count = 0;
    if (slot >= 0 && request >= 0 && request < args.acceptance.num_reqs &&
        window[1] >= num_accepted_by_warp(args.acceptance, request, window[2])) {
      count = prepare_jobs(jobs, args.table, args.log, part * split.layers_per_block,
                           split.layers_per_block, draft, slot);
    }
    if (threadIdx.x == 0) {
      num_jobs = count;
    }
  }
  __syncthreads();
  copy_jobs<Direction::kToCache>(jobs, num_jobs);
}

LayerSplit split_for(const char* op, const LayerTable& table, const UndoLog& log,
                     int64_t num_drafts, int device) {
  NWOR_CHECK(log.row_bytes <= kMaxInt32, op, "undo_log has rows of ", log.row_bytes,
             " bytes; must be at most ", kMaxInt32);
  return split_layers(num_drafts, table.num_layers, log.row_bytes,
                      num_multiprocessors(op, device));
}

DriverKernel log_launcher(reinterpret_cast<const void*>(&log_kernel));
DriverKernel restore_launcher(reinterpret_cast<const void*>(&restore_kernel));

}  // namespace

void log_cache_slots_cuda(const LogArgs& args, int device, void* stream) {
  if (args.num_drafts == 0) {
    return;
  }
  LayerSplit split = split_for(kLog, args.table, args.log, args.num_drafts, device);
  const unsigned grid = grid_size(kLog, args.num_drafts * split.blocks_per_draft);
  void* arguments[] = {const_cast<LogArgs*>(&args), &split};
  log_launcher.launch(kLog, device, grid, kBlockThreads, stream, arguments);
}

void restore_rejected_drafts_cuda(const RestoreArgs& args, int device, void* stream) {
  if (args.num_drafts == 0) {
    return;
  }
  LayerSplit split = split_for(kRestore, args.table, args.log, args.num_drafts, device);
  const unsigned grid =
      grid_size(kRestore, 1 + args.num_drafts * split.blocks_per_draft);
  void* arguments[] = {const_cast<RestoreArgs*>(&args), &split};
  restore_launcher.launch(kRestore, device, grid, kBlockThreads, stream, arguments);
}

void load_cow_kernels(const char* op, int device) {
  num_multiprocessors(op, device);
  log_launcher.load(op, device);
  restore_launcher.load(op, device);
}

}  // namespace nwor
