// SPDX-License-Identifier: Apache-2.0
//
// CUDA kernels and launchers of shadow blocks: some blocks for each window, which share
// the layers, as many as one wave on the device takes; each warp copies one row of one
// layer at a time. Row layouts only. The grid follows from what the host knows,
// everything else is read on the device.
//
// stage patches what its own blocks read: each block reads its window's entries and
// slots, then takes a ticket; the last one patches, when all others have read them.
// commit_draft_layer and unstage read `saved` only.
#include "common/driver_launch.h"
#include "common/windows_cuda.h"
#include "transaction/shadow.h"

namespace nwor {
namespace {

constexpr int kWarps = kBlockThreads / kWarpThreads;
constexpr uint32_t kUnroll = 8;
// Blocks of a launch, and what has them all run at once on 132 multiprocessors.
constexpr int64_t kBlocks = 512;
constexpr int kBlocksPerMultiprocessor = 4;

// A window in shared memory, with its entries.
struct SharedWindow {
  StagedWindow window;
  int32_t num_copied;
  int32_t real[kMaxSpan];
  int32_t shadow[kMaxSpan];
};

// By a warp. A lane's pieces are kWarpThreads apart: divide once, then step.
template <int kBytes, uint32_t kUnroll>
__device__ void copy_slot(uint8_t* to, const uint8_t* from, const LayerRow& layer) {
  using Piece = typename PieceOf<kBytes>::type;
  const auto pieces_per_run = static_cast<uint32_t>(layer.run_bytes) / kBytes;
  const uint32_t num_pieces = pieces_per_run * static_cast<uint32_t>(layer.num_heads);
  const uint32_t step_heads = kWarpThreads / pieces_per_run;
  const uint32_t step_pieces = kWarpThreads - step_heads * pieces_per_run;
  const uint32_t lane = threadIdx.x % kWarpThreads;
  uint32_t head = lane / pieces_per_run;
  uint32_t piece = lane - head * pieces_per_run;
#pragma unroll 1
  for (uint32_t first = lane; first < num_pieces; first += kUnroll * kWarpThreads) {
    Piece values[kUnroll];
    int64_t offsets[kUnroll];
#pragma unroll
    for (uint32_t u = 0; u < kUnroll; ++u) {
      offsets[u] = head * layer.head_stride + static_cast<int64_t>(piece) * kBytes;
      if (first + u * kWarpThreads < num_pieces) {
        values[u] = __ldcg(reinterpret_cast<const Piece*>(from + offsets[u]));
      }
      head += step_heads;
      piece += step_pieces;
      if (piece >= pieces_per_run) {
        piece -= pieces_per_run;
        ++head;
      }
    }
#pragma unroll
    for (uint32_t u = 0; u < kUnroll; ++u) {
      if (first + u * kWarpThreads < num_pieces) {
        __stwb(reinterpret_cast<Piece*>(to + offsets[u]), values[u]);
      }
    }
  }
}

// Where addresses and strides do not allow wide accesses. Not inlined: what a step
// fetches anew of a kernel's code is a good part of its time.
__device__ __noinline__ void copy_slot_narrowly(uint8_t* to, const uint8_t* from,
                                                const LayerRow& layer, bool by_words) {
  if (by_words) {
    copy_slot<4, 1>(to, from, layer);
  } else {
    copy_slot<1, 1>(to, from, layer);
  }
}

enum class Way { kToShadow, kToReal };

// A block's part of a window: part `number` of num_parts, which share the layers.
struct Part {
  int64_t window;
  unsigned number;
  unsigned num_parts;

  __device__ Part(unsigned block, unsigned parts_of_window)
      : window(block / parts_of_window),
        number(block % parts_of_window),
        num_parts(parts_of_window) {}
  __device__ int first_layer(int64_t num_layers, unsigned of) const {
    return static_cast<int>(static_cast<unsigned>(num_layers) * of / num_parts);
  }
};

// All warps of the block: the rows at positions [first, last) of the window, in the
// block's layers.
template <Way kWay>
__device__ void copy_rows(const LayerTable& table, const Part& part,
                          const SharedWindow& shared, int64_t first, int64_t last,
                          int64_t entry_tokens) {
  const int first_layer = part.first_layer(table.num_layers, part.number);
  const int end_layer = part.first_layer(table.num_layers, part.number + 1);
  const auto num_rows = static_cast<int>(last - first);
  const int num_copies = num_rows * (end_layer - first_layer);
  for (int i = threadIdx.x / kWarpThreads; i < num_copies; i += kWarps) {
    const LayerRow& layer = table.rows[first_layer + i / num_rows];
    const auto p = static_cast<int32_t>(first) + i % num_rows;
    auto* base = reinterpret_cast<uint8_t*>(layer.base);
    const uint32_t width = widest_access(layer);
    // A slot's block, and its place there; an entry stands for one or more blocks.
    const int32_t entry = entry_of(p, entry_tokens);
    const auto place =
        static_cast<uint32_t>(p - entry * static_cast<int32_t>(entry_tokens));
    const auto block_size = static_cast<uint32_t>(layer.block_size);
    const uint32_t blocks = static_cast<uint32_t>(entry_tokens) / block_size;
    const int64_t real =
        static_cast<int64_t>(shared.real[entry - shared.window.first_block]) * blocks +
        place / block_size;
    const int64_t shadow =
        static_cast<int64_t>(shared.shadow[entry - shared.window.first_block]) *
            blocks +
        place / block_size;
    // A layer with fewer slots than the table's first one: skip it.
    if (real >= layer.num_blocks || shadow >= layer.num_blocks) {
      continue;
    }
    uint8_t* const slot = base + place % block_size * layer.slot_stride;
    const int64_t from = kWay == Way::kToShadow ? real : shadow;
    const int64_t to = kWay == Way::kToShadow ? shadow : real;
    uint8_t* const target = slot + to * layer.block_stride;
    const uint8_t* const source = slot + from * layer.block_stride;
    if (width == 16) {
      copy_slot<16, kUnroll>(target, source, layer);
    } else {
      copy_slot_narrowly(target, source, layer, width >= 4);
    }
  }
}

// Calls visit(place, what it holds if staged, what it held), by all threads.
template <typename Visit>
__device__ void for_each_patch(const BlockTable& blocks, int64_t r,
                               const SharedWindow& shared, int64_t tokens,
                               const Visit& visit) {
  const StagedWindow& window = shared.window;
  for (int i = threadIdx.x; i < window.num_blocks; i += kBlockThreads) {
    visit(blocks.at(r, window.first_block + i), shared.shadow[i], shared.real[i]);
  }
  for (int64_t p = window.first_staged(tokens) + threadIdx.x; p < window.seq_len;
       p += kBlockThreads) {
    visit(blocks.slot_mapping[window.first_row + (p - window.first_position)],
          slot_by_entries(window, shared.shadow, p, tokens),
          slot_by_entries(window, shared.real, p, tokens));
  }
}

// Restores entries and slots that still hold what stage wrote.
__device__ void put_back(const BlockTable& blocks, int64_t r,
                         const SharedWindow& shared, int64_t tokens) {
  for_each_patch(blocks, r, shared, tokens, [](auto& place, auto shadow, auto real) {
    if (place == shadow) {
      place = real;
    }
  });
}

// A window that an earlier launch saved; num_drafts is 0 where nothing is staged, also
// where `saved` is of a batch that does not fit these tensors.
__device__ void load_saved(SharedWindow& shared, const SavedWindows& saved, int64_t r,
                           const BlockTable& blocks) {
  const int32_t* row = saved.row(r);
  const bool has_seat = saved.has_seat(r);
  if (threadIdx.x == 0) {
    StagedWindow window{};
    if (has_seat) {
      window = load_window(row);
    }
    const bool fits = window.num_drafts > 0 && window.num_blocks <= saved.span &&
                      r < blocks.num_rows &&
                      window.first_block + window.num_blocks <= blocks.width &&
                      window.first_row + window.seq_len - window.first_position <=
                          blocks.num_slots_mapped;
    if (!fits) {
      window.num_drafts = 0;
      window.num_blocks = 0;
    }
    shared.window = window;
  }
  // All that there may be, by other warps meanwhile.
  const int first = static_cast<int>(threadIdx.x) - kWarpThreads;
  for (int i = first; has_seat && 0 <= i && i < saved.span;
       i += kBlockThreads - kWarpThreads) {
    shared.real[i] = row[kSavedEntries + i];
    shared.shadow[i] = row[kSavedEntries + saved.span + i];
  }
  __syncthreads();
}

// Whether the window's entries and slots are what its patches assume; reads them to
// the end, and what the seat had, so that they may be written after all blocks have
// been here.
__device__ bool read_entries(const ShadowStageArgs& args, int64_t r,
                             SharedWindow& shared) {
  const StagedWindow& window = shared.window;
  const auto slot_at = [&](int64_t p) {
    return args.blocks.slot_mapping[window.first_row + (p - window.first_position)];
  };
  // Before anything waits for the entries, so that the loads overlap.
  const int64_t first = window.first_staged(args.entry_tokens) + threadIdx.x;
  const int64_t first_slot = first < window.seq_len ? slot_at(first) : 0;
  const SeatState seat = load_seat(args.saved.row(r));
  bool is_real = true;
  for (int i = threadIdx.x; i < window.num_blocks; i += kBlockThreads) {
    is_real = is_real && is_real_entry(args, r, window, i);
    shared.real[i] = args.blocks.at(r, window.first_block + i);
    shared.shadow[i] = args.shadow_entry(r, window.first_block + i);
  }
  if (threadIdx.x == 0) {
    shared.num_copied = num_lacking(args, seat, window, shared.real[0]);
  }
  __syncthreads();
  for (int64_t p = first; p < window.seq_len; p += kBlockThreads) {
    is_real = is_real && (p == first ? first_slot : slot_at(p)) ==
                             slot_by_entries(window, shared.real, p, args.entry_tokens);
  }
  return __syncthreads_and(is_real) != 0;
}

__device__ void patch_and_save(const ShadowStageArgs& args, int64_t r,
                               const SharedWindow& shared) {
  const StagedWindow& window = shared.window;
  for_each_patch(args.blocks, r, shared, args.entry_tokens,
                 [](auto& place, auto shadow, auto) { place = shadow; });
  int32_t* saved = args.saved.row(r);
  for (int i = threadIdx.x; i < window.num_blocks; i += kBlockThreads) {
    saved[kSavedEntries + i] = shared.real[i];
    saved[kSavedEntries + args.saved.span + i] = shared.shadow[i];
  }
  if (threadIdx.x == 0) {
    save_window(saved, window, shared.num_copied, args.step);
  }
}

__global__ void __launch_bounds__(kBlockThreads, kBlocksPerMultiprocessor)
    stage_kernel(const __grid_constant__ ShadowStageArgs args, unsigned num_parts) {
  wait_for_stream();
  __shared__ SharedWindow shared;
  __shared__ bool is_last;
  const Part part(blockIdx.x, num_parts);
  const int64_t r = part.window;
  int32_t* saved = args.saved.row(r);
  if (args.patches) {
    if (threadIdx.x == 0) {
      shared.window = find_window(args, r);
    }
    if (!args.saved.has_seat(r)) {
      return;
    }
    __syncthreads();
    const int32_t num_drafts = shared.window.num_drafts;
    if (num_drafts <= 0 || !read_entries(args, r, shared)) {
      if (part.number == 0 && threadIdx.x == 0) {
        saved[kSavedDrafts] = left_alone(args, num_drafts);
      }
      return;
    }
    if (threadIdx.x == 0) {
      __threadfence();
      is_last = atomicAdd(&saved[kSavedTicket], 1) == static_cast<int>(num_parts) - 1;
    }
    __syncthreads();
    if (is_last) {
      patch_and_save(args, r, shared);
      if (threadIdx.x == 0) {
        saved[kSavedTicket] = 0;
      }
    }
  } else {
    load_saved(shared, args.saved, r, args.blocks);
    if (shared.window.num_drafts <= 0) {
      return;
    }
    if (threadIdx.x == 0) {
      shared.num_copied = saved[kSavedCopiedRows];
    }
    __syncthreads();
  }
  const StagedWindow& window = shared.window;
  copy_rows<Way::kToShadow>(args.table, part, shared,
                            window.first_position - shared.num_copied,
                            window.first_position, args.entry_tokens);
}

// What the window of request r adds to the counters.
__device__ void count_window(const ShadowCommitArgs& args, int64_t r,
                             unsigned* counts) {
  if (!args.saved.has_seat(r)) {
    return;
  }
  const int32_t* saved = args.saved.row(r);
  const StagedWindow window = load_window(saved);
  const int num_drafts = abs(window.num_drafts);
  if (num_drafts == 0) {
    return;
  }
  const auto accepted = static_cast<int>(
      clamp_accepted(num_accepted(args.acceptance, r, num_drafts), num_drafts));
  counts[kWindows] += 1;
  counts[kStaged] += num_drafts;
  counts[kCommitted] += accepted;
  counts[kRejected] += num_drafts - accepted;
  if (window.num_drafts < 0) {
    counts[kInvalidSlots] += num_drafts;
    return;
  }
  counts[kShadowWindows] += 1;
  const int64_t kept =
      window.first_draft() + accepted - window.first_staged(args.entry_tokens);
  counts[kShadowCopiedBytes] += saved[kSavedCopiedRows];
  counts[kCommittedBytes] += kept > 0 ? static_cast<unsigned>(kept) : 0;
}

__global__ void __launch_bounds__(kBlockThreads, kBlocksPerMultiprocessor)
    commit_kernel(const __grid_constant__ ShadowCommitArgs args, unsigned num_parts) {
  wait_for_stream();
  if (blockIdx.x == 0) {
    count_windows(args.table, args.counters, args.counters_to, [&](unsigned* counts) {
      for (int64_t r = threadIdx.x; r < args.num_reqs; r += kBlockThreads) {
        count_window(args, r, counts);
      }
    });
    return;
  }
  __shared__ SharedWindow shared;
  __shared__ int64_t num_accepted_of_none;
  const Part part(blockIdx.x - 1, num_parts);
  const int64_t r = part.window;
  if (threadIdx.x >= kBlockThreads - kWarpThreads) {
    // Of a window without drafts: how many there are is read meanwhile.
    const int64_t accepted = num_accepted_by_warp(args.acceptance, r, 0);
    if (threadIdx.x == kBlockThreads - 1) {
      num_accepted_of_none = accepted;
    }
  }
  load_saved(shared, args.saved, r, args.blocks);
  const StagedWindow& window = shared.window;
  if (window.num_drafts <= 0) {
    return;
  }
  const bool is_rest = args.acceptance.num_rejected != nullptr;
  const int64_t num_kept = clamp_accepted(
      num_accepted_of_none + (is_rest ? window.num_drafts : 0), window.num_drafts);
  copy_rows<Way::kToReal>(args.table, part, shared,
                          window.first_staged(args.entry_tokens),
                          window.first_draft() + num_kept, args.entry_tokens);
  if (part.number == 0 && args.undoes) {
    if (threadIdx.x == 0) {
      save_valid(args.saved.row(r), window, num_kept, args.entry_tokens);
    }
    put_back(args.blocks, r, shared, args.entry_tokens);
  }
}

__global__ void __launch_bounds__(kBlockThreads)
    unstage_kernel(const __grid_constant__ ShadowUndoArgs args, unsigned) {
  wait_for_stream();
  __shared__ SharedWindow shared;
  load_saved(shared, args.saved, blockIdx.x, args.blocks);
  if (shared.window.num_drafts > 0) {
    put_back(args.blocks, blockIdx.x, shared, args.entry_tokens);
  }
}

DriverKernel stage_launcher(reinterpret_cast<const void*>(&stage_kernel));
DriverKernel commit_launcher(reinterpret_cast<const void*>(&commit_kernel));
DriverKernel unstage_launcher(reinterpret_cast<const void*>(&unstage_kernel));

void check_span(const char* op, const SavedWindows& saved) {
  NWOR_CHECK(saved.span <= kMaxSpan, op, "span is ", saved.span, "; must be at most ",
             kMaxSpan, " on CUDA");
}

// Blocks of a window.
unsigned parts_of_window(int64_t num_windows, int64_t num_layers) {
  const int64_t parts = (kBlocks + num_windows - 1) / num_windows;
  return static_cast<unsigned>(parts < num_layers ? parts : num_layers);
}

template <typename Args>
void launch(DriverKernel& kernel, const char* op, const Args& args, int64_t num_blocks,
            unsigned num_parts, int device, void* stream) {
  check_span(op, args.saved);
  void* arguments[] = {const_cast<Args*>(&args), &num_parts};
  kernel.launch(op, device, grid_size(op, num_blocks), kBlockThreads, stream,
                arguments);
}

}  // namespace

void stage_cuda(const ShadowStageArgs& args, int device, void* stream) {
  if (args.num_reqs > 0) {
    const unsigned parts = parts_of_window(args.num_reqs, args.table.num_layers);
    launch(stage_launcher, kStage, args, args.num_reqs * parts, parts, device, stream);
  }
}

void commit_draft_layer_cuda(const ShadowCommitArgs& args, int device, void* stream) {
  if (args.num_reqs > 0) {
    const unsigned parts = parts_of_window(args.num_reqs, args.table.num_layers);
    launch(commit_launcher, kCommit, args, 1 + args.num_reqs * parts, parts, device,
           stream);
  }
}

void unstage_cuda(const ShadowUndoArgs& args, int device, void* stream) {
  if (args.num_reqs > 0) {
    launch(unstage_launcher, kUnstage, args, args.num_reqs, 1, device, stream);
  }
}

void load_shadow_kernels(const char* op, int device) {
  stage_launcher.load(op, device);
  commit_launcher.load(op, device);
  unstage_launcher.load(op, device);
}

}  // namespace nwor
