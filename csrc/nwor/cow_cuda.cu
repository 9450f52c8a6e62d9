// SPDX-License-Identifier: Apache-2.0
//
// CUDA kernels and launchers of log_cache_slots and restore_rejected_drafts: one launch
// for all layers and drafts of a table. The grid follows from what the host knows
// (num_drafts, an upper bound, and the shapes); everything else is read on the device.
#include "copy_cuda.h"
#include "launch.h"
#include "windows_cuda.h"

namespace nwor {
namespace {

constexpr const char* kLog = "log_cache_slots";
constexpr const char* kRestore = "restore_rejected_drafts";

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
  __shared__ CopyJob jobs[kMaxLayersPerBlock];
  __shared__ int num_jobs;
  const int64_t draft = blockIdx.x / split.blocks_per_draft;
  const int part = static_cast<int>(blockIdx.x % split.blocks_per_draft);
  if (threadIdx.x < kWarpThreads) {
    const DraftPlace place = find_draft_by_warp(args.batch, draft);
    const int64_t slot = slot_of(args.batch, place, args.table.rows[0].num_slots());
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

// Blocks that only count, each kBlockThreads drafts: one atomic for each counter.
__device__ void count_drafts(const RestoreArgs& args) {
  __shared__ unsigned long long bytes_per_draft;
  if (threadIdx.x == 0) {
    bytes_per_draft = 0;
  }
  __syncthreads();
  unsigned long long layer_bytes = 0;
  for (int64_t i = threadIdx.x; i < args.table.num_layers; i += kBlockThreads) {
    layer_bytes += args.table.rows[i].num_heads * args.table.rows[i].run_bytes;
  }
  atomicAdd(&bytes_per_draft, layer_bytes);

  const int64_t draft = static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  bool is_draft = false;
  bool starts_window = false;
  bool is_rejected = false;
  bool is_invalid = false;
  bool has_slot = false;
  if (draft < args.num_drafts) {
    const int32_t* window = args.log.windows + 3 * draft;
    const int64_t slot = args.log.slots[draft];
    const bool is_known = window[0] < args.acceptance.num_reqs;
    is_draft = window[0] >= 0 && is_known;
    is_invalid = slot == kInvalidSlot || !is_known;
    has_slot = slot >= 0;
    if (is_draft) {
      starts_window = window[1] == 0;
      is_rejected = window[1] >= num_accepted(args.acceptance, window[0], window[2]);
    }
  }
  // Each of these is a barrier too: bytes_per_draft is complete after the first.
  unsigned long long sums[kNumCounters];
  sums[kWindows] = __syncthreads_count(starts_window);
  sums[kStaged] = __syncthreads_count(is_draft);
  sums[kRejected] = __syncthreads_count(is_rejected);
  sums[kCommitted] = sums[kStaged] - sums[kRejected];
  sums[kRestoredBytes] = __syncthreads_count(is_rejected && has_slot) * bytes_per_draft;
  sums[kInvalidSlots] = __syncthreads_count(is_invalid);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kNumCounters; ++i) {
      if (sums[i] != 0) {
        atomicAdd(reinterpret_cast<unsigned long long*>(args.counters) + i, sums[i]);
      }
    }
  }
}

__global__ void __launch_bounds__(kBlockThreads, kBlocksPerMultiprocessor)
    restore_kernel(const __grid_constant__ RestoreArgs args,
                   const __grid_constant__ LayerSplit split,
                   const int num_counting_blocks) {
  __shared__ CopyJob jobs[kMaxLayersPerBlock];
  __shared__ int num_jobs;
  if (blockIdx.x < num_counting_blocks) {
    count_drafts(args);
    return;
  }
  const int64_t block = blockIdx.x - num_counting_blocks;
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
  constexpr int64_t kMaxRowBytes = 2147483647;
  NWOR_CHECK(log.row_bytes <= kMaxRowBytes, op, "undo_log has rows of ", log.row_bytes,
             " bytes; must be at most ", kMaxRowBytes);
  use_device(op, device);
  return split_layers(num_drafts, table.num_layers, log.row_bytes,
                      num_multiprocessors(op, device));
}

}  // namespace

void log_cache_slots_cuda(const LogArgs& args, int device, void* stream) {
  if (args.num_drafts == 0) {
    return;
  }
  const LayerSplit split =
      split_for(kLog, args.table, args.log, args.num_drafts, device);
  const unsigned grid = grid_size(kLog, args.num_drafts * split.blocks_per_draft);
  log_kernel<<<grid, kBlockThreads, 0, static_cast<cudaStream_t>(stream)>>>(args,
                                                                            split);
  check_launch(kLog);
}

void restore_rejected_drafts_cuda(const RestoreArgs& args, int device, void* stream) {
  if (args.num_drafts == 0) {
    return;
  }
  const LayerSplit split =
      split_for(kRestore, args.table, args.log, args.num_drafts, device);
  const int64_t num_counting_blocks =
      (args.num_drafts + kBlockThreads - 1) / kBlockThreads;
  const unsigned grid = grid_size(
      kRestore, args.num_drafts * split.blocks_per_draft + num_counting_blocks);
  restore_kernel<<<grid, kBlockThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      args, split, static_cast<int>(num_counting_blocks));
  check_launch(kRestore);
}

}  // namespace nwor
