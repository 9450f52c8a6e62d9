// SPDX-License-Identifier: Apache-2.0
//
// The audit on CUDA: who calls the passes of audit_passes.h. A thread block for each
// request (plan, resolve), or for each slot, a warp for each of its layers (record,
// scan, snapshot). Row layouts only. Grids follow from what the host knows; nothing
// waits.
#include <algorithm>

#include "audit_passes.h"
#include "cuda_support.h"
#include "driver_launch.h"
#include "windows_cuda.h"

namespace nwor {
namespace {

constexpr int kAuditThreads = 512;
// A step has few rows: what counts is how long one takes.
constexpr int kRecordThreads = 1024;
constexpr int kMaxLayers = 512;
constexpr int kMaxRows = 4096;  // requests in a batch
constexpr int kIdsPerLaunch = 256;
// Thread blocks of a launch that walks slots, for each multiprocessor.
constexpr int kBlocksForSlots = 8;
constexpr uint32_t kSumUnroll = 8;

__device__ int lane_id() {
  return threadIdx.x % kWarpThreads;
}

// --- checksums -------------------------------------------------------------------

// Of one layer's bytes of a slot, kBytes at a time; the lanes' sums make the checksum.
template <int kBytes>
__device__ uint32_t sum_words(const uint8_t* from, const LayerRow& layer) {
  using Piece = typename PieceOf<kBytes>::type;
  const auto run_bytes = static_cast<uint32_t>(layer.run_bytes);
  const uint32_t num_bytes = run_bytes * static_cast<uint32_t>(layer.num_heads);
  uint32_t sum = 0;
  if constexpr (kBytes == 16) {
    const uint32_t num_pieces = num_bytes / 16;
    for (uint32_t first = lane_id(); first < num_pieces;
         first += kSumUnroll * kWarpThreads) {
      Piece values[kSumUnroll];
#pragma unroll
      for (uint32_t u = 0; u < kSumUnroll; ++u) {
        const uint32_t piece = first + u * kWarpThreads;
        if (piece < num_pieces) {
          const uint32_t head = piece * 16 / run_bytes;
          const uint8_t* run = from + head * layer.head_stride;
          values[u] = __ldcg(
              reinterpret_cast<const Piece*>(run + (piece * 16 - head * run_bytes)));
        }
      }
#pragma unroll
      for (uint32_t u = 0; u < kSumUnroll; ++u) {
        const uint32_t piece = first + u * kWarpThreads;
        if (piece < num_pieces) {
          const uint64_t low = values[u].x | static_cast<uint64_t>(values[u].y) << 32;
          const uint64_t high = values[u].z | static_cast<uint64_t>(values[u].w) << 32;
          sum += checksum_of(low, 2 * piece) + checksum_of(high, 2 * piece + 1);
        }
      }
    }
  } else {
    // Words may go over from a run to the next, pieces do not.
    for (uint32_t word = lane_id(); word * 8 < num_bytes; word += kWarpThreads) {
      uint64_t value = 0;
#pragma unroll
      for (uint32_t byte = 0; byte < 8; byte += kBytes) {
        const uint32_t offset = word * 8 + byte;
        if (offset < num_bytes) {
          const uint32_t head = offset / run_bytes;
          const uint8_t* run = from + head * layer.head_stride;
          const Piece piece =
              __ldcg(reinterpret_cast<const Piece*>(run + (offset - head * run_bytes)));
          if constexpr (kBytes == 8) {
            value = piece.x | static_cast<uint64_t>(piece.y) << 32;
          } else {
            value |= static_cast<uint64_t>(piece) << (8 * byte);
          }
        }
      }
      sum += checksum_of(value, word);
    }
  }
  return sum;
}

// By a warp; all lanes get it.
__device__ int32_t layer_checksum(const LayerRow& layer, int64_t slot) {
  if (slot >= layer.num_slots()) {
    return 0;
  }
  const uint8_t* from =
      reinterpret_cast<const uint8_t*>(layer.base) + layer.slot_offset(slot);
  const uint32_t width = widest_access(
      static_cast<uint64_t>(layer.base) | layer.block_stride | layer.slot_stride |
      layer.run_bytes | (layer.num_heads > 1 ? layer.head_stride : 0));
  uint32_t sum = 0;
  switch (width) {
    case 16:
      sum = sum_words<16>(from, layer);
      break;
    case 8:
      sum = sum_words<8>(from, layer);
      break;
    case 4:
      sum = sum_words<4>(from, layer);
      break;
    case 2:
      sum = sum_words<2>(from, layer);
      break;
    default:
      sum = sum_words<1>(from, layer);
  }
  __syncwarp();
  return static_cast<int32_t>(__reduce_add_sync(kFullWarp, sum));
}

// --- teams -----------------------------------------------------------------------

// The threads of a thread block.
template <int kThreads>
class Block {
 public:
  __device__ int64_t index() const { return threadIdx.x; }
  __device__ int64_t size() const { return kThreads; }
  __device__ int64_t lane() const { return lane_id(); }
  __device__ int64_t num_lanes() const { return kWarpThreads; }
  __device__ bool is_first_warp() const { return warp_id() == 0; }
  __device__ bool is_last_warp() const {
    return warp_id() == kThreads / kWarpThreads - 1;
  }
  __device__ void sync() const { __syncthreads(); }

  __device__ TeamSum sum(int64_t value) const {
    __shared__ int64_t of_warps[kThreads / kWarpThreads];
    TeamSum sum{warp_sum(value), 0};
    if (lane_id() == kWarpThreads - 1) {
      of_warps[warp_id()] = sum.inclusive;
    }
    __syncthreads();
    int64_t before = 0;
    for (int w = 0; w < kThreads / kWarpThreads; ++w) {
      before = w < warp_id() ? add(before, of_warps[w]) : before;
      sum.total = add(sum.total, of_warps[w]);
    }
    sum.inclusive = add(sum.inclusive, before);
    __syncthreads();
    return sum;
  }

  __device__ int64_t warp_sum(int64_t value) const {
#pragma unroll
    for (int by = 1; by < kWarpThreads; by *= 2) {
      const auto before = static_cast<int64_t>(
          __shfl_up_sync(kFullWarp, static_cast<long long>(value), by));
      if (lane_id() >= by) {
        value = add(value, before);
      }
    }
    return value;
  }

  __device__ int64_t of_first(int64_t value) const {
    __shared__ int64_t shared;
    if (threadIdx.x == 0) {
      shared = value;
    }
    __syncthreads();
    return shared;
  }
  __device__ int64_t of_last_lane(int64_t value) const {
    return static_cast<int64_t>(
        __shfl_sync(kFullWarp, static_cast<long long>(value), kWarpThreads - 1));
  }
  __device__ int64_t count_lanes(bool is) const {
    return __popc(__ballot_sync(kFullWarp, is));
  }
  __device__ int64_t first_lane(bool is) const {
    return __ffs(__ballot_sync(kFullWarp, is)) - 1;
  }
  // What other thread blocks wrote, too.
  __device__ int32_t load(const int32_t* from) const { return __ldcg(from); }
  __device__ int64_t load(const int64_t* from) const {
    return static_cast<int64_t>(__ldcg(reinterpret_cast<const long long*>(from)));
  }

  __device__ int64_t num_accepted(const Acceptance& acceptance, int64_t r,
                                  int64_t num_drafts) const {
    return of_first(is_first_warp() ? num_accepted_by_warp(acceptance, r, num_drafts)
                                    : 0);
  }

  __device__ const int32_t* checksums(const AuditPart& part, int64_t slot) const {
    __shared__ int32_t sums[kMaxLayers];
    for (int64_t i = warp_id(); i < part.table.num_layers;
         i += kThreads / kWarpThreads) {
      const int32_t sum = layer_checksum(part.table.rows[i], slot);
      if (lane_id() == 0) {
        sums[i] = sum;
      }
    }
    __syncthreads();
    return sums;
  }

 private:
  __device__ static int warp_id() { return threadIdx.x / kWarpThreads; }
};

// Whether this is the last thread block of the launch; what the others wrote is seen.
__device__ bool is_last_block(FindingsHeader* header) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = count(header->num_blocks_done) == static_cast<int64_t>(gridDim.x) - 1;
    __threadfence();
  }
  __syncthreads();
  return is_last;
}

// --- kernels ---------------------------------------------------------------------

__global__ void __launch_bounds__(kAuditThreads)
    audit_seat_kernel(const __grid_constant__ AuditSeatArgs args) {
  wait_for_stream();
  Block<kAuditThreads> team;
  seat_request(team, args);
}

__global__ void __launch_bounds__(kAuditThreads)
    audit_plan_kernel(const __grid_constant__ AuditPlanArgs args) {
  wait_for_stream();
  Block<kAuditThreads> team;
  plan_request(team, args, blockIdx.x);
}

__global__ void __launch_bounds__(kAuditThreads)
    audit_keep_kernel(const __grid_constant__ AuditResolveArgs args) {
  wait_for_stream();
  Block<kAuditThreads> team;
  keep_request(team, args, blockIdx.x);
}

__global__ void __launch_bounds__(kAuditThreads)
    audit_check_kernel(const __grid_constant__ AuditResolveArgs args) {
  wait_for_stream();
  Block<kAuditThreads> team;
  check_request(team, args, blockIdx.x);
}

__global__ void __launch_bounds__(kAuditThreads)
    audit_adopt_kernel(const __grid_constant__ AuditResolveArgs args,
                       const __grid_constant__ AuditHit hit) {
  wait_for_stream();
  Block<kAuditThreads> team;
  adopt(team, args, hit);
}

__global__ void __launch_bounds__(kRecordThreads)
    audit_record_kernel(const __grid_constant__ AuditResolveArgs args,
                        const __grid_constant__ AuditPart part) {
  wait_for_stream();
  Block<kRecordThreads> team;
  for (int64_t i = blockIdx.x; i < args.num_tokens; i += gridDim.x) {
    record_row(team, args, part, i);
  }
  if (is_last_block(args.group.header)) {
    judge_suspects(team, args, part);
  }
}

// Two blocks of threads on a multiprocessor: the registers of one would not let them.
__global__ void __launch_bounds__(kAuditThreads, 2)
    audit_scan_kernel(const __grid_constant__ AuditResolveArgs args,
                      const __grid_constant__ AuditPart part,
                      const __grid_constant__ ScanRange range) {
  wait_for_stream();
  __shared__ int64_t ends[kMaxRows];
  Block<kAuditThreads> team;
  const Places places = places_of(team, args, range, ends);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    move_cursor(args.group, range, places);
  }
  const int64_t num_slots = places.count * args.group.block_size;
  for (int64_t n = blockIdx.x; n < num_slots; n += gridDim.x) {
    scan_slot(team, args, part, range, places, n);
  }
}

__global__ void __launch_bounds__(kAuditThreads)
    audit_snapshot_kernel(const __grid_constant__ AuditSnapshotArgs args,
                          const __grid_constant__ AuditPart part) {
  wait_for_stream();
  Block<kAuditThreads> team;
  for (int64_t slot = blockIdx.x; slot < args.group.num_slots(); slot += gridDim.x) {
    snapshot_slot(team, args.group, part, args.again, slot);
  }
}

// Numbers that the host has: they travel with the launch. A thread block for each.
struct Ids {
  int32_t blocks[kIdsPerLaunch];
  int64_t values[kIdsPerLaunch];
};
__global__ void __launch_bounds__(kBlockThreads)
    audit_blocks_kernel(const __grid_constant__ AuditBlocksArgs args,
                        const __grid_constant__ Ids ids) {
  wait_for_stream();
  Block<kBlockThreads> team;
  block_event(team, args, ids.blocks[blockIdx.x], ids.values[blockIdx.x]);
}

__global__ void __launch_bounds__(kBlockThreads)
    audit_publish_kernel(const __grid_constant__ AuditResolveArgs args) {
  wait_for_stream();
  Block<kBlockThreads> team;
  publish(team, args);
}

// --- launches --------------------------------------------------------------------

DriverKernel seat_launcher(reinterpret_cast<const void*>(&audit_seat_kernel));
DriverKernel plan_launcher(reinterpret_cast<const void*>(&audit_plan_kernel));
DriverKernel keep_launcher(reinterpret_cast<const void*>(&audit_keep_kernel));
DriverKernel check_launcher(reinterpret_cast<const void*>(&audit_check_kernel));
DriverKernel adopt_launcher(reinterpret_cast<const void*>(&audit_adopt_kernel));
DriverKernel record_launcher(reinterpret_cast<const void*>(&audit_record_kernel));
DriverKernel scan_launcher(reinterpret_cast<const void*>(&audit_scan_kernel));
DriverKernel snapshot_launcher(reinterpret_cast<const void*>(&audit_snapshot_kernel));
DriverKernel blocks_launcher(reinterpret_cast<const void*>(&audit_blocks_kernel));
DriverKernel publish_launcher(reinterpret_cast<const void*>(&audit_publish_kernel));

// Where an op's kernels are launched.
struct Launcher {
  const char* op;
  int device;
  void* stream;

  // args: the kernel's.
  template <typename... Args>
  void operator()(DriverKernel& kernel, int64_t num_blocks, unsigned num_threads,
                  const Args&... args) const {
    if (num_blocks > 0) {
      void* arguments[] = {const_cast<Args*>(&args)...};
      kernel.launch_early(op, device, grid_size(op, num_blocks), num_threads, stream,
                          arguments);
    }
  }

  // Thread blocks for `num_slots` slots, of which each takes one at a time.
  int64_t blocks_for_slots(int64_t num_slots) const {
    return std::min<int64_t>(num_slots,
                             kBlocksForSlots * num_multiprocessors(op, device));
  }

  void scan(const AuditResolveArgs& args, int64_t row, int64_t num_blocks) const {
    // A batch has no more blocks than its requests may have; beyond a cache's own
    // number it takes another step to come around.
    const AuditGroup& group = args.group;
    const ScanRange range{row, std::min(num_blocks, group.num_blocks)};
    const int64_t num_rows = row < 0 ? args.batch.num_reqs : 1;
    const int64_t most_blocks = std::min(range.num_blocks, num_rows * group.max_blocks);
    const int64_t grid = blocks_for_slots(most_blocks * group.block_size);
    for (int64_t i = 0; i < group.num_parts; ++i) {
      (*this)(scan_launcher, grid, kAuditThreads, args, args.parts[i], range);
    }
  }
};

}  // namespace

void audit_seat_cuda(const AuditSeatArgs& args, int device, void* stream) {
  Launcher{"audit_seat", device, stream}(seat_launcher, 1, kAuditThreads, args);
}

void audit_plan_cuda(const AuditPlanArgs& args, int device, void* stream) {
  const Launcher launch{"audit_plan", device, stream};
  launch(plan_launcher, args.batch.num_reqs, kAuditThreads, args);
}

void audit_resolve_cuda(const AuditResolveArgs& args, int device, void* stream) {
  const Launcher launch{"audit_resolve", device, stream};
  const int64_t num_reqs = args.batch.num_reqs;
  NWOR_CHECK(num_reqs <= kMaxRows, launch.op, "num_reqs is ", num_reqs,
             "; must be at most ", kMaxRows, " on CUDA");
  launch(keep_launcher, num_reqs, kAuditThreads, args);
  launch(check_launcher, num_reqs, kAuditThreads, args);
  for (int64_t i = 0; i < args.group.num_parts; ++i) {
    launch(record_launcher, args.num_tokens, kRecordThreads, args, args.parts[i]);
  }
  for (int64_t i = 0; i < args.num_hits; ++i) {
    launch(adopt_launcher, 1, kAuditThreads, args, args.hits[i]);
    launch.scan(args, args.hits[i].row, args.num_hit_blocks);
  }
  launch.scan(args, -1, args.num_blocks);
  launch(publish_launcher, 1, kBlockThreads, args);
}

void audit_blocks_cuda(const AuditBlocksArgs& args, int device, void* stream) {
  const Launcher launch{"audit_blocks", device, stream};
  for (int64_t first = 0; first < args.count; first += kIdsPerLaunch) {
    const int64_t count = std::min<int64_t>(args.count - first, kIdsPerLaunch);
    Ids ids{};
    std::copy_n(args.blocks + first, count, ids.blocks);
    std::copy_n(args.values + first, count, ids.values);
    launch(blocks_launcher, count, kBlockThreads, args, ids);
  }
}

void audit_snapshot_cuda(const AuditSnapshotArgs& args, int device, void* stream) {
  const Launcher launch{"audit_snapshot", device, stream};
  for (int64_t i = 0; i < args.group.num_parts; ++i) {
    const AuditPart& part = args.parts[i];
    NWOR_CHECK(part.runs.data == nullptr, launch.op,
               "runs are given; slots must be rows on CUDA");
    NWOR_CHECK(part.table.num_layers <= kMaxLayers, launch.op, "table has ",
               part.table.num_layers, " layers; must have at most ", kMaxLayers,
               " on CUDA");
    launch(snapshot_launcher, launch.blocks_for_slots(args.group.num_slots()),
           kAuditThreads, args, part);
  }
  // The audit begins: what the first launches of the others would do besides.
  for (DriverKernel* kernel : {&seat_launcher, &plan_launcher, &keep_launcher,
                               &check_launcher, &adopt_launcher, &record_launcher,
                               &scan_launcher, &blocks_launcher, &publish_launcher}) {
    kernel->load(launch.op, device);
  }
}

}  // namespace nwor
