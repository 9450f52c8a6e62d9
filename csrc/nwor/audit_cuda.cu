// SPDX-License-Identifier: Apache-2.0
//
// The audit on CUDA: who does audit_rules.h's work. A thread block for each request
// (plan, resolve), or for each slot, a warp for each of its layers (record, scan,
// snapshot). Row layouts only. Grids follow from what the host knows; nothing waits.
//
// Values that come from the device are not trusted: a request whose seat or rows are
// out of range is left alone.
#include "audit_rules.h"
#include "cuda_support.h"
#include "driver_launch.h"
#include "windows_cuda.h"

namespace nwor {
namespace {

constexpr int kAuditThreads = 512;
constexpr int kAuditWarps = kAuditThreads / kWarpThreads;
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
__device__ int warp_id() {
  return threadIdx.x / kWarpThreads;
}

// --- scans -----------------------------------------------------------------------

__device__ int64_t warp_inclusive_sum(int64_t value) {
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

// Of all threads of the block, which all call it: the sum up to this one, and of all.
struct BlockSum {
  int64_t inclusive;
  int64_t total;
};
__device__ BlockSum block_sum(int64_t value) {
  __shared__ int64_t of_warps[kAuditWarps];
  BlockSum sum{warp_inclusive_sum(value), 0};
  if (lane_id() == kWarpThreads - 1) {
    of_warps[warp_id()] = sum.inclusive;
  }
  __syncthreads();
  int64_t before = 0;
  for (int w = 0; w < kAuditWarps; ++w) {
    before = w < warp_id() ? add(before, of_warps[w]) : before;
    sum.total = add(sum.total, of_warps[w]);
  }
  sum.inclusive = add(sum.inclusive, before);
  __syncthreads();
  return sum;
}

// --- requests --------------------------------------------------------------------

// The rows of a request. No rows where what the device says makes no sense.
struct Rows {
  int64_t begin;
  int64_t end;
  bool is_valid;
};

__device__ Rows rows_of(const AuditGroup& group, const AuditBatch& batch, int64_t r,
                        int64_t num_tokens) {
  const int64_t seat = batch.row_seats.at(r);
  const Rows rows{batch.query_start_loc[r], batch.query_start_loc[r + 1], true};
  const bool is_valid = seat >= 0 && seat < group.num_seats && rows.begin >= 0 &&
                        rows.begin <= rows.end && rows.end <= num_tokens;
  return is_valid ? rows : Rows{0, 0, false};
}

__global__ void __launch_bounds__(kAuditThreads)
    audit_seat_kernel(const __grid_constant__ AuditSeatArgs args) {
  wait_for_stream();
  const AuditGroup& group = args.group;
  int64_t hash = args.fresh.seed;
  for (int64_t first = 0; first < args.length; first += kAuditThreads) {
    const int64_t p = first + threadIdx.x;
    const BlockSum sum =
        block_sum(p < args.length ? identity_of(args.tokens[p], p) : 0);
    if (p < args.length && group.is_block_end(p)) {
      expected_at(group, args.seat, p / group.block_size) = add(hash, sum.inclusive);
    }
    hash = add(hash, sum.total);
  }
  for (int64_t b = args.length / group.block_size + threadIdx.x; b < group.max_blocks;
       b += kAuditThreads) {
    expected_at(group, args.seat, b) = 0;
  }
  if (threadIdx.x == 0) {
    Seat seat = args.fresh;
    seat.hash = hash;
    seat.length = args.length;
    group.seats[args.seat] = seat;
  }
}

__global__ void __launch_bounds__(kAuditThreads)
    audit_plan_kernel(const __grid_constant__ AuditPlanArgs args) {
  wait_for_stream();
  __shared__ int64_t base;
  const int64_t r = blockIdx.x;
  const Rows rows = rows_of(args.group, args.batch, r, args.num_tokens);
  if (rows.begin == rows.end) {
    return;
  }
  if (threadIdx.x == 0) {
    base = base_of(args.group, args.batch.row_seats.at(r), args.positions[rows.begin]);
  }
  __syncthreads();
  int64_t hash = base;
  for (int64_t first = rows.begin; first < rows.end; first += kAuditThreads) {
    const int64_t i = first + threadIdx.x;
    const BlockSum sum =
        block_sum(i < rows.end ? identity_of(args.tokens[i], args.positions[i]) : 0);
    if (i < rows.end) {
      plan_row(args, r, i, add(hash, sum.inclusive));
    }
    hash = add(hash, sum.total);
  }
}

// Resolve, first: what is kept, of all requests.
__global__ void __launch_bounds__(kAuditThreads)
    audit_keep_kernel(const __grid_constant__ AuditResolveArgs args) {
  wait_for_stream();
  __shared__ int64_t kept_end;
  const int64_t r = blockIdx.x;
  const Rows rows = rows_of(args.group, args.batch, r, args.group.max_tokens);
  if (threadIdx.x < kWarpThreads) {
    const int64_t num_drafts = num_drafts_of(args, r);
    int64_t accepted = 0;
    if (num_drafts > 0) {
      accepted = num_accepted_by_warp(args.acceptance, r, num_drafts);
    }
    if (threadIdx.x == 0) {
      kept_end = kept_end_of(rows.end, num_drafts, accepted);
    }
  }
  __syncthreads();
  for (int64_t i = rows.begin + threadIdx.x; i < rows.end; i += kAuditThreads) {
    keep_row(args, r, i, i < kept_end, i == kept_end - 1);
  }
}

// Resolve, then: do the tables lead to it.
__global__ void __launch_bounds__(kAuditThreads)
    audit_check_kernel(const __grid_constant__ AuditResolveArgs args) {
  wait_for_stream();
  const AuditGroup& group = args.group;
  const int64_t r = blockIdx.x;
  const Rows rows = rows_of(group, args.batch, r, group.max_tokens);
  if (!rows.is_valid) {
    return;
  }
  const Seat& seat = group.seats[args.batch.row_seats.at(r)];
  if (seat.opaque) {
    return;
  }
  int64_t num_compared = 0;
  for (int64_t i = rows.begin + threadIdx.x; i < rows.end; i += kAuditThreads) {
    num_compared += check_row(args, r, i);
  }
  __syncthreads();  // a row that is reported takes its block's end off
  const int64_t end = least(seat.length / group.block_size, group.max_blocks);
  for (int64_t b = first_block(group, seat.length, args.window) + threadIdx.x; b < end;
       b += kAuditThreads) {
    num_compared += check_end(args, r, b);
  }
  const int64_t total = block_sum(num_compared).total;
  if (threadIdx.x == 0) {
    count(group.header->num_identities, total);
  }
}

__global__ void __launch_bounds__(kAuditThreads)
    audit_adopt_kernel(const __grid_constant__ AuditAdoptArgs args) {
  wait_for_stream();
  const AuditGroup& group = args.group;
  const int64_t seat_index = args.batch.row_seats.at(args.row);
  if (seat_index < 0 || seat_index >= group.num_seats) {
    return;
  }
  Seat& seat = group.seats[seat_index];
  if (threadIdx.x == 0) {
    seat.is_new = 0;
  }
  if (seat.opaque) {
    return;
  }
  // From the last on: a block that is reported is not known to the next any more.
  const int64_t first = first_block(group, args.length, args.window);
  for (int64_t end = last_block(group, args.length); end > first;
       end -= kAuditThreads) {
    const int64_t b = end - 1 - threadIdx.x;
    const int64_t hash = b >= first ? hash_before(group, seat_index, b) : 0;
    __syncthreads();
    if (b >= first) {
      adopt_block(args, b, hash);
    }
  }
}

// --- bytes -----------------------------------------------------------------------

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

// All warps of the block: a slot's checksums in all layers, to shared memory.
__device__ void slot_checksums(const AuditBytes& bytes, int64_t slot, int32_t* sums) {
  const int num_warps = static_cast<int>(blockDim.x) / kWarpThreads;
  for (int64_t i = warp_id(); i < bytes.table.num_layers; i += num_warps) {
    const int32_t sum = layer_checksum(bytes.table.rows[i], slot);
    if (lane_id() == 0) {
      sums[i] = sum;
    }
  }
  __syncthreads();
}

// By a warp; all lanes get it.
__device__ Compared compare_by_warp(const int32_t* known, const int32_t* found,
                                    int64_t num_layers) {
  Compared compared{known, found, num_layers, 0, -1, -1};
  for (int64_t first = 0; first < num_layers; first += kWarpThreads) {
    const int64_t i = first + lane_id();
    const bool is_layer = i < num_layers;
    const bool is_same = is_layer && __ldcg(known + i) == found[i];
    const unsigned same = __ballot_sync(kFullWarp, is_same);
    const unsigned other = __ballot_sync(kFullWarp, is_layer && !is_same);
    compared.num_same += __popc(same);
    if (compared.first_same < 0 && same != 0) {
      compared.first_same = first + __ffs(same) - 1;
    }
    if (compared.first_other < 0 && other != 0) {
      compared.first_other = first + __ffs(other) - 1;
    }
  }
  return compared;
}

__device__ void keep_checksums(const AuditBytes& bytes, int32_t* known,
                               const int32_t* found) {
  for (int64_t i = threadIdx.x; i < bytes.table.num_layers; i += blockDim.x) {
    known[i] = found[i];
  }
}

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

__global__ void __launch_bounds__(kRecordThreads)
    audit_record_kernel(const __grid_constant__ AuditRecordArgs args) {
  wait_for_stream();
  __shared__ int32_t sums[kMaxLayers];
  const AuditGroup& group = args.group;
  for (int64_t i = blockIdx.x; i < args.num_tokens; i += gridDim.x) {
    const PlanRow& row = group.plan[i];
    const int64_t slot = row.slot;
    // One value for all threads: judging a row changes its `suspect`.
    const bool is_recorded = slot >= 0 && slot < group.num_slots && row.suspect == 0;
    const bool is_judged = row.old.content != kContentNone;
    __syncthreads();
    if (!is_recorded) {
      continue;
    }
    int32_t* const known = args.bytes.known(slot);
    slot_checksums(args.bytes, slot, sums);
    if (is_judged && threadIdx.x < kWarpThreads) {
      const Compared compared =
          compare_by_warp(known, sums, args.bytes.table.num_layers);
      if (threadIdx.x == 0) {
        judge_row(args, i, compared);
      }
    }
    __syncthreads();
    keep_checksums(args.bytes, known, sums);
    if (args.is_last && threadIdx.x == 0) {
      group.records[slot].content = kContentKnown;
    }
    __syncthreads();  // before the next row's sums
  }
  FindingsHeader* const header = group.header;
  if (!is_last_block(header)) {
    return;
  }
  const auto num_suspects =
      static_cast<int64_t>(__ldcg(reinterpret_cast<long long*>(&header->num_suspects)));
  __syncthreads();
  if (threadIdx.x == 0) {
    header->num_blocks_done = 0;
    header->num_suspects = 0;
  }
  if (num_suspects == 0) {
    return;
  }
  for (int64_t i = threadIdx.x; i < args.num_tokens; i += kRecordThreads) {
    judge_suspect(args, i);
  }
  __syncthreads();
  for (int64_t i = threadIdx.x; i < args.num_tokens; i += kRecordThreads) {
    group.plan[i].suspect = least(group.plan[i].suspect, 0);
  }
}

// check_block of audit_cpu.cpp by a warp: compares the slots of a full block from its
// end back, a record's own token leading from its H to the one before, up to the first
// that is wrong or not known.
__device__ void check_block_by_warp(const AuditScanArgs& args, int64_t r, int64_t b) {
  const AuditGroup& group = args.group;
  const int64_t seat_index = args.batch.row_seats.at(r);
  int64_t hash = expected_at(group, seat_index, b);
  if (hash == 0 || group.seats[seat_index].opaque) {
    return;
  }
  __syncwarp();
  const int64_t begin = b * group.block_size;
  for (int64_t last = begin + group.block_size - 1; last >= begin;
       last -= kWarpThreads) {
    const int64_t p = last - lane_id();
    const int64_t slot = p >= begin ? args.batch.slot(r, p) : -1;
    const bool is_known = is_in_cache(group, slot);
    SlotRecord record{};
    if (is_known) {
      record = group.records[slot];
    }
    const int64_t own = is_known ? identity_of(record.token, p) : 0;
    const int64_t through = warp_inclusive_sum(own);
    const int64_t here = subtract(hash, subtract(through, own));
    const bool ends = !is_known || record.state == kSlotUnknown;
    const bool is_wrong = !ends && !holds(record, here);
    const unsigned stops = __ballot_sync(kFullWarp, ends || is_wrong);
    if (stops != 0) {
      if (is_wrong && lane_id() == __ffs(stops) - 1) {
        report_prefix(group, slot, p, here, seat_index, args.step);
      }
      return;
    }
    hash = subtract(hash,
                    static_cast<int64_t>(__shfl_sync(
                        kFullWarp, static_cast<long long>(through), kWarpThreads - 1)));
  }
}

// The blocks of a row that scan looks at.
struct RowBlocks {
  int64_t first;
  int64_t count;
};
__device__ RowBlocks blocks_of(const AuditScanArgs& args, int64_t r) {
  const int64_t seat_index = args.batch.row_seats.at(r);
  if (seat_index < 0 || seat_index >= args.group.num_seats) {
    return {0, 0};
  }
  const Seat& seat = args.group.seats[seat_index];
  const int64_t length = args.row < 0 ? seat.length : seat.hit_length;
  const int64_t first = first_block(args.group, length, args.window);
  return {first, most(0, last_block(args.group, length) - first)};
}

// Two blocks of threads on a multiprocessor: the registers of one would not let them.
__global__ void __launch_bounds__(kAuditThreads, 2)
    audit_scan_kernel(const __grid_constant__ AuditScanArgs args) {
  wait_for_stream();
  __shared__ int32_t sums[kMaxLayers];
  // Blocks of the rows up to each, this one included.
  __shared__ int64_t ends[kMaxRows];
  __shared__ int32_t shared_content;
  const AuditGroup& group = args.group;
  const int64_t first_row = args.row < 0 ? 0 : args.row;
  const int64_t num_rows = args.row < 0 ? args.batch.num_reqs : 1;
  int64_t num_places = 0;
  for (int64_t first = 0; first < num_rows; first += kAuditThreads) {
    const int64_t r = first + threadIdx.x;
    const BlockSum sum =
        block_sum(r < num_rows ? blocks_of(args, first_row + r).count : 0);
    if (r < num_rows) {
      ends[r] = num_places + sum.inclusive;
    }
    num_places += sum.total;
  }
  __syncthreads();
  const int64_t count_places = least(args.num_blocks, num_places);
  const int64_t start = args.row < 0 ? group.header->cursor : 0;
  if (args.row < 0 && num_places > 0 && blockIdx.x == 0 && threadIdx.x == 0) {
    group.header->next_cursor = (start + count_places) % num_places;
  }
  for (int64_t unit = blockIdx.x; unit < count_places * group.block_size;
       unit += gridDim.x) {
    const int64_t n = (start + unit / group.block_size) % num_places;
    const int64_t o = unit % group.block_size;
    // The row: the first that ends behind n.
    int64_t low = 0;
    for (int64_t high = num_rows - 1; low < high;) {
      const int64_t middle = (low + high) / 2;
      if (ends[middle] > n) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    const int64_t r = first_row + low;
    const int64_t b = blocks_of(args, r).first + n - (low == 0 ? 0 : ends[low - 1]);
    const int64_t seat_index = args.batch.row_seats.at(r);
    const int64_t length = group.seats[seat_index].length;
    if (o == 0 && args.is_last && warp_id() == kAuditWarps - 1 &&
        (b + 1) * group.block_size <= length) {
      check_block_by_warp(args, r, b);
    }
    const int64_t position = b * group.block_size + o;
    const int64_t slot = position < length ? args.batch.slot(r, position) : -1;
    if (!is_in_cache(group, slot) || !has_bytes(group.records[slot])) {
      continue;
    }
    SlotRecord& record = group.records[slot];
    if (threadIdx.x == 0) {
      // Of the requests that share the slot, one compares it.
      shared_content = exchange(record.content, kContentClaimed);
      __threadfence();
    }
    __syncthreads();
    const int32_t content = shared_content;
    if (content != kContentClaimed) {
      int32_t* const known = args.bytes.known(slot);
      slot_checksums(args.bytes, slot, sums);
      if (threadIdx.x < kWarpThreads) {
        const int64_t num_layers = args.bytes.table.num_layers;
        const Compared compared = compare_by_warp(known, sums, num_layers);
        Stored stored{is_fresh(content) ? stored_slot(group, slot) : kNotStored, {}};
        if (stored.slot >= 0) {
          stored.compared =
              compare_by_warp(args.bytes.known(stored.slot), sums, num_layers);
        }
        if (threadIdx.x == 0) {
          judge_slot(args, seat_index, slot, position, content, compared, stored);
          if (args.is_last && content == kContentKnown) {
            count(group.header->num_contents);
          }
        }
      }
      __syncthreads();
      keep_checksums(args.bytes, known, sums);
      __syncthreads();
      if (threadIdx.x == 0) {
        __threadfence();
        exchange(record.content, args.is_last ? kContentKnown : content);
      }
    }
    __syncthreads();  // before the next slot's content and sums
  }
}

__global__ void __launch_bounds__(kAuditThreads)
    audit_snapshot_kernel(const __grid_constant__ AuditSnapshotArgs args) {
  wait_for_stream();
  __shared__ int32_t sums[kMaxLayers];
  for (int64_t slot = blockIdx.x; slot < args.group.num_slots; slot += gridDim.x) {
    if (!is_taken(args.group.records[slot], args.again)) {
      continue;
    }
    slot_checksums(args.bytes, slot, sums);
    keep_checksums(args.bytes, args.bytes.known(slot), sums);
    if (threadIdx.x == 0) {
      args.group.records[slot].content = kContentKnown;
    }
    __syncthreads();
  }
}

// --- blocks ----------------------------------------------------------------------

// Numbers that the host has: they travel with the launch.
struct Ids {
  int32_t count;
  int32_t blocks[kIdsPerLaunch];
  int64_t values[kIdsPerLaunch];
};

// A thread block for each: of a block that is stored, it keeps what is known.
__global__ void __launch_bounds__(kIdsPerLaunch)
    audit_hand_on_kernel(const __grid_constant__ AuditHandOnArgs args,
                         const __grid_constant__ Ids ids) {
  wait_for_stream();
  const AuditGroup& group = args.group;
  const int64_t block = ids.blocks[blockIdx.x];
  const int64_t number = ids.values[blockIdx.x];
  if (threadIdx.x == 0) {
    hand_on_block(group, block, number, args.step, args.fills);
  }
  if (args.fills || number == 0) {
    return;
  }
  const int64_t kept = group.kept_block(number);
  if (threadIdx.x == 0) {
    group.stores[kept] = number;
  }
  const int64_t from = block * group.block_size;
  const int64_t to = kept * group.block_size;
  for (int64_t o = threadIdx.x; o < group.block_size; o += kIdsPerLaunch) {
    group.records[to + o] = group.records[from + o];
  }
  const int64_t columns = args.num_columns;
  for (int64_t i = threadIdx.x; i < group.block_size * columns; i += kIdsPerLaunch) {
    args.contents[to * columns + i] = args.contents[from * columns + i];
  }
}

__global__ void __launch_bounds__(kIdsPerLaunch)
    audit_hand_out_kernel(const __grid_constant__ AuditHandOutArgs args,
                          const __grid_constant__ Ids ids) {
  wait_for_stream();
  if (static_cast<int32_t>(threadIdx.x) < ids.count) {
    hand_out_block(args.group, ids.blocks[threadIdx.x],
                   static_cast<int32_t>(ids.values[threadIdx.x]));
  }
}

__global__ void __launch_bounds__(kBlockThreads)
    audit_publish_kernel(const __grid_constant__ AuditPublishArgs args) {
  wait_for_stream();
  constexpr int kWords = sizeof(Finding) / sizeof(int64_t);
  const auto* from = reinterpret_cast<const int64_t*>(args.group.findings);
  auto* to = reinterpret_cast<int64_t*>(args.findings_to);
  for (int64_t i = threadIdx.x; i < num_to_publish(args.group) * kWords;
       i += kBlockThreads) {
    to[i] = from[i];
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    end_step(args);
  }
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
DriverKernel hand_on_launcher(reinterpret_cast<const void*>(&audit_hand_on_kernel));
DriverKernel hand_out_launcher(reinterpret_cast<const void*>(&audit_hand_out_kernel));
DriverKernel publish_launcher(reinterpret_cast<const void*>(&audit_publish_kernel));

template <typename Args>
void launch(DriverKernel& kernel, const char* op, const Args& args, int64_t num_blocks,
            int device, void* stream, unsigned num_threads = kAuditThreads) {
  if (num_blocks > 0) {
    void* arguments[] = {const_cast<Args*>(&args)};
    kernel.launch_early(op, device, grid_size(op, num_blocks), num_threads, stream,
                        arguments);
  }
}

// Thread blocks for `num_slots` slots, of which each takes one at a time.
int64_t blocks_for_slots(const char* op, int64_t num_slots, int device) {
  return least(num_slots, kBlocksForSlots * num_multiprocessors(op, device));
}

void check_bytes(const char* op, const AuditBytes& bytes) {
  NWOR_CHECK(bytes.runs.data == nullptr, op,
             "runs is given; must be None on CUDA, where slots are rows");
  NWOR_CHECK(bytes.table.num_layers <= kMaxLayers, op, "table has ",
             bytes.table.num_layers, " layers; must have at most ", kMaxLayers,
             " on CUDA");
}

// values: of the blocks. is_wide: each block has a thread block of its own.
template <typename Args, typename Value>
void launch_ids(DriverKernel& kernel, const char* op, const Args& args,
                const Value* values, bool is_wide, int device, void* stream) {
  for (int64_t first = 0; first < args.count; first += kIdsPerLaunch) {
    Ids ids{};
    ids.count = static_cast<int32_t>(least(args.count - first, kIdsPerLaunch));
    for (int32_t i = 0; i < ids.count; ++i) {
      ids.blocks[i] = args.blocks[first + i];
      ids.values[i] = values[first + i];
    }
    void* arguments[] = {const_cast<Args*>(&args), &ids};
    kernel.launch_early(op, device, grid_size(op, is_wide ? ids.count : 1),
                        kIdsPerLaunch, stream, arguments);
  }
}

}  // namespace

void audit_seat_cuda(const AuditSeatArgs& args, int device, void* stream) {
  launch(seat_launcher, "audit_seat", args, 1, device, stream);
}

void audit_plan_cuda(const AuditPlanArgs& args, int device, void* stream) {
  launch(plan_launcher, "audit_plan", args, args.batch.num_reqs, device, stream);
}

void audit_resolve_cuda(const AuditResolveArgs& args, int device, void* stream) {
  launch(keep_launcher, "audit_resolve", args, args.batch.num_reqs, device, stream);
  launch(check_launcher, "audit_resolve", args, args.batch.num_reqs, device, stream);
}

void audit_adopt_cuda(const AuditAdoptArgs& args, int device, void* stream) {
  launch(adopt_launcher, "audit_adopt", args, 1, device, stream);
}

void audit_record_cuda(const AuditRecordArgs& args, int device, void* stream) {
  check_bytes("audit_record", args.bytes);
  launch(record_launcher, "audit_record", args, args.num_tokens, device, stream,
         kRecordThreads);
}

void audit_scan_cuda(const AuditScanArgs& args, int device, void* stream) {
  constexpr const char* kOp = "audit_scan";
  check_bytes(kOp, args.bytes);
  NWOR_CHECK(args.batch.num_reqs <= kMaxRows, kOp, "num_reqs is ", args.batch.num_reqs,
             "; must be at most ", kMaxRows, " on CUDA");
  // A batch has no more blocks than its requests may have; beyond a cache's own number
  // it takes another step to come around.
  const AuditGroup& group = args.group;
  AuditScanArgs bounded = args;
  bounded.num_blocks = least(args.num_blocks, group.num_slots / group.block_size);
  const int64_t num_rows = args.row < 0 ? args.batch.num_reqs : 1;
  const int64_t most_blocks = least(bounded.num_blocks, num_rows * group.max_blocks);
  launch(scan_launcher, kOp, bounded,
         blocks_for_slots(kOp, most_blocks * group.block_size, device), device, stream);
}

void audit_hand_on_cuda(const AuditHandOnArgs& args, int device, void* stream) {
  launch_ids(hand_on_launcher, "audit_hand_on", args, args.numbers, true, device,
             stream);
}

void audit_snapshot_cuda(const AuditSnapshotArgs& args, int device, void* stream) {
  constexpr const char* kOp = "audit_snapshot";
  check_bytes(kOp, args.bytes);
  launch(snapshot_launcher, kOp, args,
         blocks_for_slots(kOp, args.group.num_slots, device), device, stream);
  // The audit begins: what the first launches of the others would do besides.
  for (DriverKernel* kernel :
       {&seat_launcher, &plan_launcher, &keep_launcher, &check_launcher,
        &adopt_launcher, &record_launcher, &scan_launcher, &hand_on_launcher,
        &hand_out_launcher, &publish_launcher}) {
    kernel->load(kOp, device);
  }
}

void audit_hand_out_cuda(const AuditHandOutArgs& args, int device, void* stream) {
  launch_ids(hand_out_launcher, "audit_hand_out", args, args.generations, false, device,
             stream);
}

void audit_publish_cuda(const AuditPublishArgs& args, int device, void* stream) {
  launch(publish_launcher, "audit_publish", args, 1, device, stream, kBlockThreads);
}

}  // namespace nwor
