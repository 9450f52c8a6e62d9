// SPDX-License-Identifier: Apache-2.0
//
// CUDA kernels and launchers of stage and commit_draft_layer: one launch for all drafts
// of a layer, keys and values; a block copies one draft's key or value. Strides are
// known to the host, which chooses the width of the accesses.
#include "launch.h"
#include "windows_cuda.h"

namespace nwor {
namespace {

constexpr const char* kStage = "stage";
constexpr const char* kCommit = "commit_draft_layer";

// A row of heads seen as pieces of one access each.
struct PieceRows {
  uint8_t* bytes;
  int64_t row_stride;
  int64_t head_stride;
  int64_t piece_stride;
};

struct RowCopy {
  PieceRows target;
  PieceRows source;
  uint32_t num_heads;
  uint32_t pieces_per_head;
};

// The two copies of a launch, of keys (blockIdx.y == 0) and of values.
struct RowCopies {
  RowCopy of[2];
  int width;
};

struct StagePlan {
  RowCopies copies;
  BatchWindows batch;
  int64_t* log_slots;
  int32_t* log_windows;
};

struct CommitPlan {
  RowCopies copies;
  PagedRows cache[2];  // for the place of a slot only
  const int64_t* log_slots;
  const int32_t* log_windows;
  Acceptance acceptance;
};

template <int kBytes>
__device__ void copy_row(uint8_t* target, const uint8_t* source, const RowCopy& copy) {
  using Piece = typename PieceOf<kBytes>::type;
  const uint32_t num_pieces = copy.num_heads * copy.pieces_per_head;
  for (uint32_t i = threadIdx.x; i < num_pieces; i += kBlockThreads) {
    const uint32_t head = i / copy.pieces_per_head;
    const uint32_t piece = i - head * copy.pieces_per_head;
    *reinterpret_cast<Piece*>(target + head * copy.target.head_stride +
                              piece * copy.target.piece_stride) =
        *reinterpret_cast<const Piece*>(source + head * copy.source.head_stride +
                                        piece * copy.source.piece_stride);
  }
}

template <int kBytes>
__global__ void __launch_bounds__(kBlockThreads)
    stage_kernel(const __grid_constant__ StagePlan plan) {
  __shared__ int64_t token;
  const int64_t draft = blockIdx.x;
  if (threadIdx.x < kWarpThreads) {
    const DraftPlace place = find_draft_by_warp(plan.batch, draft);
    // Where the slots end is known when they are committed.
    const int64_t slot = slot_of(plan.batch, place, INT64_MAX);
    if (threadIdx.x == 0) {
      token = slot >= 0 ? plan.batch.logits_indices.at(place.logits_row) : -1;
      if (blockIdx.y == 0) {
        write_log_entry(plan.log_slots, plan.log_windows, draft, place, slot);
      }
    }
  }
  __syncthreads();
  if (token >= 0) {
    const RowCopy& copy = plan.copies.of[blockIdx.y];
    copy_row<kBytes>(copy.target.bytes + draft * copy.target.row_stride,
                     copy.source.bytes + token * copy.source.row_stride, copy);
  }
}

template <int kBytes>
__global__ void __launch_bounds__(kBlockThreads)
    commit_kernel(const __grid_constant__ CommitPlan plan) {
  const int64_t draft = blockIdx.x;
  const int64_t slot = plan.log_slots[draft];
  const int32_t* window = plan.log_windows + 3 * draft;
  const PagedRows& cache = plan.cache[blockIdx.y];
  if (slot < 0 || slot >= cache.num_slots() || window[0] < 0 ||
      window[0] >= plan.acceptance.num_reqs ||
      window[1] >= num_accepted_by_warp(plan.acceptance, window[0], window[2])) {
    return;
  }
  const RowCopy& copy = plan.copies.of[blockIdx.y];
  copy_row<kBytes>(cache.slot(slot), copy.source.bytes + draft * copy.source.row_stride,
                   copy);
}

// Or-ed addresses and strides of rows whose elements touch; 0 for other rows.
uint64_t alignment_of(const HeadRows& rows) {
  return reinterpret_cast<uint64_t>(rows.bytes) | rows.row_stride | rows.head_stride;
}

RowCopy plan_row(const HeadRows& target, const HeadRows& source, int64_t element_bytes,
                 int width) {
  const auto pieces = [&](const HeadRows& rows) {
    return PieceRows{rows.bytes, rows.row_stride, rows.head_stride,
                     width == element_bytes ? rows.dim_stride : width};
  };
  return {pieces(target), pieces(source), static_cast<uint32_t>(source.num_heads),
          static_cast<uint32_t>(source.head_size * element_bytes / width)};
}

// `extra`: further strides that addresses are made of.
RowCopies plan_copies(const HeadRows& target_key, const HeadRows& key,
                      const HeadRows& target_value, const HeadRows& value,
                      int64_t element_bytes, uint64_t extra) {
  uint64_t bits = extra;
  bool contiguous = true;
  for (const HeadRows* rows : {&target_key, &key, &target_value, &value}) {
    bits |= alignment_of(*rows) | rows->head_size * element_bytes;
    contiguous = contiguous && rows->dim_stride == element_bytes;
  }
  const int width = contiguous ? static_cast<int>(widest_access(bits))
                               : static_cast<int>(element_bytes);
  return {{plan_row(target_key, key, element_bytes, width),
           plan_row(target_value, value, element_bytes, width)},
          width};
}

#define NWOR_LAUNCH_BY_WIDTH(op, kernel, plan, num_drafts, stream) \
  do {                                                             \
    const dim3 grid(grid_size(op, num_drafts), 2);                 \
    const auto on_stream = static_cast<cudaStream_t>(stream);      \
    switch ((plan).copies.width) {                                 \
      case 16:                                                     \
        kernel<16><<<grid, kBlockThreads, 0, on_stream>>>(plan);   \
        break;                                                     \
      case 8:                                                      \
        kernel<8><<<grid, kBlockThreads, 0, on_stream>>>(plan);    \
        break;                                                     \
      case 4:                                                      \
        kernel<4><<<grid, kBlockThreads, 0, on_stream>>>(plan);    \
        break;                                                     \
      case 2:                                                      \
        kernel<2><<<grid, kBlockThreads, 0, on_stream>>>(plan);    \
        break;                                                     \
      default:                                                     \
        kernel<1><<<grid, kBlockThreads, 0, on_stream>>>(plan);    \
    }                                                              \
    check_launch(op);                                              \
  } while (0)

}  // namespace

void stage_cuda(const StageArgs& args, int device, void* stream) {
  if (args.num_drafts == 0) {
    return;
  }
  use_device(kStage, device);
  const StagePlan plan{plan_copies(args.staging_key, args.key, args.staging_value,
                                   args.value, args.element_bytes, 0),
                       args.batch, args.log_slots, args.log_windows};
  NWOR_LAUNCH_BY_WIDTH(kStage, stage_kernel, plan, args.num_drafts, stream);
}

void commit_draft_layer_cuda(const CommitArgs& args, int device, void* stream) {
  if (args.num_drafts == 0) {
    return;
  }
  use_device(kCommit, device);
  const uint64_t block_strides =
      args.key_cache.block_stride | args.value_cache.block_stride;
  const CommitPlan plan{
      plan_copies(args.key_cache.rows, args.staging_key, args.value_cache.rows,
                  args.staging_value, args.element_bytes, block_strides),
      {args.key_cache, args.value_cache},
      args.log_slots,
      args.log_windows,
      args.acceptance};
  NWOR_LAUNCH_BY_WIDTH(kCommit, commit_kernel, plan, args.num_drafts, stream);
}

}  // namespace nwor
