// SPDX-License-Identifier: Apache-2.0
//
// CUDA kernels and launchers of log_cache_slots and restore_rejected_drafts: one launch
// for all layers and drafts of a table. The grid follows from what the host knows
// (num_drafts, an upper bound, and the shapes); everything else is read on the device.
#include <algorithm>

#include "copy_cuda.h"
#include "cow.h"
#include "driver_launch.h"
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

// What one thread or block counted; bytes are drafts until the end.
struct Counts {
  unsigned of[kNumCounters] = {};

  __device__ void add(const RestoreArgs& args, int64_t draft) {
    const int32_t* window = args.log.windows + 3 * draft;
    const int64_t slot = args.log.slots[draft];
    const bool is_known = window[0] < args.acceptance.num_reqs;
    of[kInvalidSlots] += slot == kInvalidSlot || !is_known;
    if (window[0] < 0 || !is_known) {
      return;
    }
    const bool is_rejected =
        window[1] >= num_accepted(args.acceptance, window[0], window[2]);
    of[kWindows] += window[1] == 0;
    of[kStaged] += 1;
    of[kCommitted] += !is_rejected;
    of[kRejected] += is_rejected;
    of[kRestoredBytes] += is_rejected && slot >= 0;
  }
};

// The work of a block that only counts: all drafts, so that it knows the sums, and can
// write them where the host reads them. No other launch of the stream runs beside it.
__device__ void count_drafts(const RestoreArgs& args) {
  __shared__ unsigned long long bytes_per_draft;
  __shared__ unsigned sums[kNumCounters];
  if (threadIdx.x < kNumCounters) {
    sums[threadIdx.x] = 0;
  }
  if (threadIdx.x == 0) {
    bytes_per_draft = 0;
  }
  __syncthreads();
  unsigned long long layer_bytes = 0;
  for (int64_t i = threadIdx.x; i < args.table.num_layers; i += kBlockThreads) {
    layer_bytes += args.table.rows[i].num_heads * args.table.rows[i].run_bytes;
  }
  atomicAdd(&bytes_per_draft, layer_bytes);

  Counts counts;
#pragma unroll 4
  for (int64_t draft = threadIdx.x; draft < args.num_drafts; draft += kBlockThreads) {
    counts.add(args, draft);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kNumCounters; ++i) {
    const unsigned of_warp = __reduce_add_sync(kFullWarp, counts.of[i]);
    if (threadIdx.x % kWarpThreads == 0) {
      atomicAdd(&sums[i], of_warp);
    }
  }
  __syncthreads();
  if (threadIdx.x < kNumCounters) {
    const int i = threadIdx.x;
    const int64_t total =
        args.counters[i] +
        static_cast<int64_t>(sums[i] * (i == kRestoredBytes ? bytes_per_draft : 1));
    args.counters[i] = total;
    if (args.counters_to != nullptr) {
      args.counters_to[i] = total;
    }
  }
}

__global__ void __launch_bounds__(kBlockThreads, kBlocksPerMultiprocessor)
    restore_kernel(const __grid_constant__ RestoreArgs args,
                   const __grid_constant__ LayerSplit split) {
  __shared__ CopyJob jobs[kMaxLayersPerBlock];
  __shared__ int num_jobs;
  if (blockIdx.x == 0) {
    count_drafts(args);
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

void check_device_sees(const char* op, const int64_t* counters_to) {
  // What a step hands over is in the same few places again and again.
  constexpr int kNumKnown = 64;
  thread_local const int64_t* known[kNumKnown] = {};
  thread_local int oldest = 0;
  if (std::find(known, known + kNumKnown, counters_to) != known + kNumKnown) {
    return;
  }
  void* seen = nullptr;
  const cudaError_t error =
      cudaHostGetDevicePointer(&seen, const_cast<int64_t*>(counters_to), 0);
  NWOR_CHECK(error == cudaSuccess && seen == counters_to, op,
             "counters_to is memory that the device does not see at its address; must "
             "be pinned");
  known[oldest] = counters_to;
  oldest = (oldest + 1) % kNumKnown;
}

#define NWOR_TEXT(...) #__VA_ARGS__
#define NWOR_VALUE(...) NWOR_TEXT(__VA_ARGS__)
const char* cuda_build() {
  return NWOR_VALUE(CUDART_VERSION) " " NWOR_VALUE(__CUDA_ARCH_LIST__);
}

}  // namespace nwor
