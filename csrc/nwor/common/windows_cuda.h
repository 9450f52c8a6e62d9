// SPDX-License-Identifier: Apache-2.0
//
// Window arithmetic by a whole warp, on top of window.h: the same predicates, with the
// 32 lanes reading 32 entries at once, so that the loads overlap.
// All lanes must call these, with the same arguments; all get the same result.
#pragma once

#include "common/cuda_support.h"
#include "common/window.h"

namespace nwor {

// The place of draft d. Narrows [low, high], which holds the smallest r with
// d < drafts_through(r), to the first of 32 segments whose last entry is beyond d.
// high == num_reqs to the end: d is not a draft.
__device__ inline DraftPlace find_draft_by_warp(const BatchWindows& batch, int64_t d) {
  const int lane = threadIdx.x % kWarpThreads;
  int64_t low = 0;
  int64_t high = batch.num_reqs;
  while (low < high) {
    const int64_t step = (high - low + kWarpThreads - 1) / kWarpThreads;
    int64_t last = low + (lane + 1) * step - 1;
    last = last < high ? last : high - 1;
    const unsigned beyond =
        __ballot_sync(kFullWarp, d < drafts_through(batch.cu_num_logits, last));
    if (beyond == 0) {
      low = high;
      break;
    }
    const int segment = __ffs(beyond) - 1;
    const int64_t segment_last = low + (segment + 1) * step - 1;
    high = segment_last < high ? segment_last : high - 1;
    low += segment * step;
  }
  return low == batch.num_reqs ? no_draft()
                               : place_in_request(batch.cu_num_logits, low, d);
}

// The slot of a draft; kPadSlot, or kInvalidSlot where an index is out of range.
__device__ inline int64_t slot_of(const BatchWindows& batch, const DraftPlace& place,
                                  int64_t num_slots) {
  if (place.request < 0) {
    return kPadSlot;
  }
  if (place.logits_row >= batch.num_logits) {
    return kInvalidSlot;
  }
  const int64_t token = batch.logits_indices.at(place.logits_row);
  if (token < 0 || token >= batch.num_tokens) {
    return kInvalidSlot;
  }
  const int64_t slot = batch.slot_mapping[token];
  return slot >= kPadSlot && slot < num_slots ? slot : kInvalidSlot;
}

// num_accepted of window.h.
__device__ inline int64_t num_accepted_by_warp(const Acceptance& acceptance,
                                               int64_t request, int64_t num_drafts) {
  if (acceptance.num_rejected != nullptr) {
    return num_drafts - acceptance.num_rejected[request];
  }
  int64_t num_valid = 0;
#pragma unroll 1
  for (int64_t first = 0; first < acceptance.num_columns; first += kWarpThreads) {
    const int64_t column = first + threadIdx.x % kWarpThreads;
    const bool valid =
        column < acceptance.num_columns && acceptance.is_valid(request, column);
    num_valid += __popc(__ballot_sync(kFullWarp, valid));
  }
  return num_valid > 0 ? num_valid - 1 : 0;
}

// The work of the one thread block that counts, for all windows of a launch, so that it
// has the sums and can write them where the host reads them. No other launch of the
// stream runs at the same time. count(counts): each thread adds the windows that it
// reads, bytes in slots. counters_to: as the op's.
template <typename Count>
__device__ void count_windows(const LayerTable& table, int64_t* counters,
                              int64_t* counters_to, const Count& count) {
  __shared__ unsigned long long slot_bytes;
  __shared__ unsigned sums[kNumCounters];
  if (threadIdx.x < kNumCounters) {
    sums[threadIdx.x] = 0;
  }
  if (threadIdx.x == 0) {
    slot_bytes = 0;
  }
  __syncthreads();
  // Loads without dependencies come first, so that they overlap.
  const int64_t before = threadIdx.x < kNumCounters ? counters[threadIdx.x] : 0;
  unsigned long long layer_bytes = 0;
  // By other warps than those that read the first windows.
#pragma unroll 1
  for (int64_t i = kBlockThreads - 1 - threadIdx.x; i < table.num_layers;
       i += kBlockThreads) {
    layer_bytes += table.rows[i].num_heads * table.rows[i].run_bytes;
  }
  atomicAdd(&slot_bytes, layer_bytes);
  unsigned counts[kNumCounters] = {};
  count(counts);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kNumCounters; ++i) {
    const unsigned of_warp = __reduce_add_sync(kFullWarp, counts[i]);
    if (threadIdx.x % kWarpThreads == 0) {
      atomicAdd(&sums[i], of_warp);
    }
  }
  __syncthreads();
  if (threadIdx.x < kNumCounters) {
    const int i = threadIdx.x;
    const bool is_bytes =
        i == kRestoredBytes || i == kShadowCopiedBytes || i == kCommittedBytes;
    const int64_t total =
        before + static_cast<int64_t>(sums[i] * (is_bytes ? slot_bytes : 1));
    counters[i] = total;
    if (counters_to != nullptr) {
      counters_to[i] = total;
    }
  }
}

}  // namespace nwor
