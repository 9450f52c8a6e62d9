// SPDX-License-Identifier: Apache-2.0
//
// The audit on CUDA: who calls the passes of audit_rules.h. A thread block for each
// request, or for each slot, a warp for each of its layers. Row layouts only. Grids
// follow from what the host knows; nothing waits.
#include <algorithm>
#include <type_traits>

#include "audit/audit_rules.h"
#include "audit/states_rules.h"
#include "common/cuda_support.h"
#include "common/driver_launch.h"
#include "common/windows_cuda.h"

namespace nwor {
namespace {

// Threads of a thread block, and how many blocks fit a multiprocessor at least.
// RecordRows: a step has few rows, what counts is how long one takes.
// ScanSlots: the registers of one would not let there be two.
template <typename Pass>
constexpr int kThreadsOf =
    std::is_same_v<Pass, RecordRows> ? 1024
    : std::is_same_v<Pass, BlockEvents> || std::is_same_v<Pass, Publish> ||
            std::is_same_v<Pass, TakeDigests> || std::is_base_of_v<StatesPass, Pass>
        ? kBlockThreads
        : 512;
// By another pass at once: those of audit_resolve but the last, and before it the
// states'.
template <typename Pass>
constexpr bool kIsFollowed =
    std::is_same_v<Pass, KeepRequests> || std::is_same_v<Pass, AdoptHit> ||
    std::is_same_v<Pass, CheckRequests> || std::is_same_v<Pass, RecordRows> ||
    std::is_same_v<Pass, ScanSlots> || std::is_same_v<Pass, TakeDigests> ||
    std::is_same_v<Pass, WrittenStates>;
// Of a request, for one thread block: a warp each.
constexpr int64_t kStatesOfBlock = kBlockThreads / kWarpThreads;
template <typename Pass>
constexpr int kBlocksOf = std::is_same_v<Pass, ScanSlots> ? 2 : 1;

constexpr int kMaxLayers = 512;
// Thread blocks of a launch that walks slots, for each multiprocessor, at most.
constexpr int64_t kBlocksForSlots = 8;
// Beside the drafter's kernels: one on each multiprocessor of this share of all, or as
// many as have so many slots each.
constexpr int64_t kShareBeside = 4;
constexpr int64_t kSlotsBeside = 32;
constexpr uint32_t kSumUnroll = 8;
// Of a warp, for a part of a state's sample.
constexpr int kLanesOfPart = kWarpThreads / kSampleParts;

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
  const uint32_t width = widest_access(layer);
  const uint32_t sum = width == 16  ? sum_words<16>(from, layer)
                       : width == 8 ? sum_words<8>(from, layer)
                       : width == 4 ? sum_words<4>(from, layer)
                       : width == 2 ? sum_words<2>(from, layer)
                                    : sum_words<1>(from, layer);
  __syncwarp();
  return static_cast<int32_t>(__reduce_add_sync(kFullWarp, sum));
}

// --- teams -----------------------------------------------------------------------

// The threads of a thread block.
template <int kThreads>
class Block {
 public:
  // Of a sample of states.
  static constexpr int64_t kWordsOfLane = kSampleWords / kWarpThreads;
  static constexpr int64_t kPartsOfLane = 1;
  static_assert(kWordsOfLane == 1);

  __device__ Share share(int64_t count) const { return {blockIdx.x, count, gridDim.x}; }
  __device__ int64_t index() const { return threadIdx.x; }
  __device__ int64_t size() const { return kThreads; }
  __device__ int64_t lane() const { return lane_id(); }
  __device__ int64_t num_lanes() const { return kWarpThreads; }
  __device__ bool is_first_warp() const { return warp_id() == 0; }
  __device__ bool is_last_warp() const {
    return warp_id() == kThreads / kWarpThreads - 1;
  }
  __device__ int64_t warp() const { return warp_id(); }
  __device__ int64_t num_warps() const { return kThreads / kWarpThreads; }
  __device__ void sync() const { __syncthreads(); }
  __device__ void warp_sync() const { __syncwarp(); }
  template <typename Of>
  __device__ void sum_parts(uint32_t (&parts)[kPartsOfLane], const Of& of_word) const {
    parts[0] = of_word(lane_id());
#pragma unroll
    for (int by = 1; by < kLanesOfPart; by *= 2) {
      parts[0] += __shfl_xor_sync(kFullWarp, parts[0], by);
    }
  }
  __device__ int64_t part(int64_t) const { return lane_id() / kLanesOfPart; }
  __device__ uint64_t over_parts(uint64_t value) const {
#pragma unroll
    for (int by = kLanesOfPart; by < kWarpThreads; by *= 2) {
      value += __shfl_xor_sync(kFullWarp, value, by);
    }
    return value;
  }
  // Whether this is the last of `count` thread blocks that come here, ticket by ticket.
  // What they wrote before is seen by `load`.
  __device__ bool is_last_of(int64_t count, int32_t& ticket) const {
    bool is_last = false;
    if (threadIdx.x == 0) {
      __threadfence();
      is_last = atomicAdd(&ticket, 1) == count - 1;
      if (is_last) {
        ticket = 0;
        __threadfence();
      }
    }
    return of_first(is_last) != 0;
  }

  __device__ TeamSum sum(uint64_t value) const {
    __shared__ uint64_t of_warps[kThreads / kWarpThreads];
    TeamSum sum{warp_sum(value), 0};
    if (lane_id() == kWarpThreads - 1) {
      of_warps[warp_id()] = sum.inclusive;
    }
    __syncthreads();
    uint64_t before = 0;
    for (int w = 0; w < kThreads / kWarpThreads; ++w) {
      before += w < warp_id() ? of_warps[w] : 0;
      sum.total += of_warps[w];
    }
    sum.inclusive += before;
    __syncthreads();
    return sum;
  }

  __device__ uint64_t warp_sum(uint64_t value) const {
#pragma unroll
    for (int by = 1; by < kWarpThreads; by *= 2) {
      const uint64_t before = __shfl_up_sync(kFullWarp, value, by);
      value += lane_id() >= by ? before : 0;
    }
    return value;
  }

  __device__ uint64_t of_first(uint64_t value) const {
    __shared__ uint64_t shared;
    if (threadIdx.x == 0) {
      shared = value;
    }
    __syncthreads();
    return shared;
  }
  __device__ uint64_t of_last_lane(uint64_t value) const {
    return __shfl_sync(kFullWarp, value, kWarpThreads - 1);
  }
  __device__ int64_t count_lanes(bool is) const {
    return __popc(__ballot_sync(kFullWarp, is));
  }
  __device__ int64_t first_lane(bool is) const {
    return __ffs(__ballot_sync(kFullWarp, is)) - 1;
  }
  // What other thread blocks wrote, too.
  template <typename Value>
  __device__ Value load(const Value* from) const {
    return __ldcg(from);
  }

  __device__ int64_t* room(int64_t) const {
    __shared__ int64_t values[kMaxReqs];
    return values;
  }

  __device__ int64_t num_accepted(const Acceptance& acceptance, int64_t r,
                                  int64_t num_drafts) const {
    return of_first(is_first_warp() ? num_accepted_by_warp(acceptance, r, num_drafts)
                                    : 0);
  }

  template <typename Pass>
  __device__ const int32_t* checksums(const Pass& pass, int64_t slot) const {
    __shared__ int32_t sums[kMaxLayers];
    for (int64_t i = warp_id(); i < pass.num_columns; i += kThreads / kWarpThreads) {
      const int32_t sum = layer_checksum(pass.layers.rows[i], slot);
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

template <typename Pass>
__global__ void __launch_bounds__(kThreadsOf<Pass>, kBlocksOf<Pass>)
    audit_kernel(const __grid_constant__ Pass pass) {
  // Not where the other stream begins: what comes next in this one is vLLM's.
  const bool forks = (std::is_same_v<Pass, CheckRequests> && pass.beside != nullptr) ||
                     (std::is_same_v<Pass, WrittenStates> && pass.is_all_beside);
  wait_for_stream(kIsFollowed<Pass> && !forks);
  Block<kThreadsOf<Pass>> team;
  pass(team);
}

template <typename Pass>
DriverKernel launcher(reinterpret_cast<const void*>(&audit_kernel<Pass>));

struct Gpu {
  const char* op;
  int device;
  void* stream;
  bool is_beside = false;

  // What runs beside waits for an event first, and may take its time.
  Gpu beside(const AuditGroup& group) const {
    if (group.beside == nullptr) {
      return *this;
    }
    auto* const event = static_cast<cudaEvent_t>(group.forked);
    auto* const to = static_cast<cudaStream_t>(group.beside);
    cudaError_t error = cudaEventRecord(event, static_cast<cudaStream_t>(stream));
    if (error == cudaSuccess) {
      error = cudaStreamWaitEvent(to, event, 0);
    }
    NWOR_CHECK(error == cudaSuccess, op,
               "the second stream cannot begin: ", cudaGetErrorString(error));
    return {op, device, to, true};
  }

  template <typename Pass>
  void run(const Pass& pass, int64_t num_teams) const {
    if (num_teams > 0) {
      void* arguments[] = {const_cast<Pass*>(&pass)};
      launcher<Pass>.launch(op, device, grid_size(op, num_teams), kThreadsOf<Pass>,
                            stream, arguments, !is_beside);
    }
  }

  // A thread block takes one slot at a time.
  template <typename Pass>
  void run_slots(const Pass& pass, int64_t num_slots) const {
    NWOR_CHECK(pass.num_parts == 1 && !pass.parts[0].runs.data &&
                   pass.layers.num_layers <= kMaxLayers,
               op, "there are ", pass.num_parts, " tables of layers, the first of ",
               pass.layers.num_layers, "; must be one on CUDA, of at most ", kMaxLayers,
               " layers, without runs");
    const int64_t num_processors = num_multiprocessors(op, device);
    int64_t most = kBlocksForSlots * num_processors;
    if (is_beside) {
      most = std::min(
          most, std::max(num_processors / kShareBeside, num_slots / kSlotsBeside));
    }
    run(pass, std::min(num_slots, most));
  }
  void run_scan(ScanSlots pass) const {
    // A batch has no more blocks than its requests may have; beyond a cache's own
    // number it takes another step to come around.
    pass.max_scanned = std::min(pass.max_scanned, pass.num_blocks);
    const int64_t num_blocks =
        std::min(pass.max_scanned, pass.num_rows() * pass.max_blocks);
    run_slots(pass, num_blocks * pass.block_size);
  }

  int64_t num_parts(int64_t num_states) const {
    return (num_states + kStatesOfBlock - 1) / kStatesOfBlock;
  }

  void check(const AuditStep& args) const {
    NWOR_CHECK(args.num_reqs <= kMaxReqs, op, "num_reqs is ", args.num_reqs,
               "; must be at most ", kMaxReqs, " on CUDA");
  }
};

template <typename... Passes>
void load(const Gpu& gpu) {
  (launcher<Passes>.load(gpu.op, gpu.device), ...);
}

}  // namespace

template <typename Args>
void audit_cuda(const Args& args, int device, void* stream) {
  const Gpu gpu{Args::kOp, device, stream};
  call(gpu, args);
  if (std::is_same_v<Args, AuditSnapshotArgs>) {
    // The audit begins: load the other kernels now, not in the first step.
    load<SeatRequest, PlanRequests, Reseed, KeepRequests, CheckRequests, AdoptHit,
         RecordRows, ScanSlots, TakeDigests, BlockEvents, Publish, ReadStates,
         WrittenStates>(gpu);
  }
}
#define NWOR_OF(name) template void audit_cuda(const Audit##name##Args&, int, void*);
NWOR_AUDIT_CALLS(NWOR_OF)

}  // namespace nwor
