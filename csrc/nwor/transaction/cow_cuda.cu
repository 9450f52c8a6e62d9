// SPDX-License-Identifier: Apache-2.0
//
// CUDA kernels and launchers of log_cache_slots and restore_rejected_drafts: one launch
// for all layers and drafts of a table. The grid follows from what the host knows
// (num_drafts, an upper bound, and the shapes); everything else is read on the device.
#include "common/driver_launch.h"
#include "common/windows_cuda.h"
#include "transaction/copy_cuda.h"
#include "transaction/cow.h"

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
  constexpr int64_t kMaxRowBytes = 2147483647;
  NWOR_CHECK(log.row_bytes <= kMaxRowBytes, op, "undo_log has rows of ", log.row_bytes,
             " bytes; must be at most ", kMaxRowBytes);
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
