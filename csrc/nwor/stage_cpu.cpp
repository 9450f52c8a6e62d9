// SPDX-License-Identifier: Apache-2.0
//
// CPU launchers of stage and commit_draft_layer: a layer's draft keys and
// values to the staging buffers, and the accepted ones from there to the cache.
// Reference: unquantised, element by element unless rows are contiguous.
#include "check.h"
#include "copy_cpu.h"
#include "launch.h"
#include "windows_cpu.h"

namespace nwor {
namespace {

constexpr const char* kStage = "stage";
constexpr const char* kCommit = "commit_draft_layer";

// One row of heads; shapes agree, strides need not.
void copy_heads(uint8_t* target, const HeadRows& target_rows, const uint8_t* source,
                const HeadRows& source_rows, int64_t element_bytes) {
  const bool contiguous = target_rows.dim_stride == element_bytes &&
                          source_rows.dim_stride == element_bytes;
  for (int64_t head = 0; head < source_rows.num_heads; ++head) {
    uint8_t* to = target + head * target_rows.head_stride;
    const uint8_t* from = source + head * source_rows.head_stride;
    if (contiguous) {
      copy_bytes(to, from, source_rows.head_size * element_bytes);
      continue;
    }
    for (int64_t dim = 0; dim < source_rows.head_size; ++dim) {
      copy_bytes(to + dim * target_rows.dim_stride, from + dim * source_rows.dim_stride,
                 element_bytes);
    }
  }
}

}  // namespace

void stage_cpu(const StageArgs& args) {
  if (args.num_drafts == 0) {
    return;
  }
  check_windows(kStage, args.batch, args.num_drafts);
  for_each_draft(kStage, args.batch,
                 [&](int64_t draft, const DraftPlace&, int64_t slot) {
                   NWOR_CHECK(slot >= kPadSlot, kStage, "slot of draft ", draft, " is ",
                              slot, "; must be -1 (padding) or at least 0");
                 });

  write_windows(kStage, args.batch, args.log_slots, args.log_windows, args.num_drafts);
  const auto stage_row = [&](const HeadRows& staging, const HeadRows& rows,
                             int64_t draft, int64_t token) {
    copy_heads(staging.bytes + draft * staging.row_stride, staging,
               rows.bytes + token * rows.row_stride, rows, args.element_bytes);
  };
  for_each_draft(kStage, args.batch,
                 [&](int64_t draft, const DraftPlace& place, int64_t slot) {
                   if (slot < 0) {
                     return;
                   }
                   const int64_t token = args.batch.logits_indices.at(place.logits_row);
                   stage_row(args.staging_key, args.key, draft, token);
                   stage_row(args.staging_value, args.value, draft, token);
                 });
}

void commit_draft_layer_cpu(const CommitArgs& args) {
  const int64_t num_slots = args.key_cache.num_slots();
  for (int64_t draft = 0; draft < args.num_drafts; ++draft) {
    check_logged_window(kCommit, args.log_windows, draft, args.acceptance);
    const int64_t slot = args.log_slots[draft];
    NWOR_CHECK(slot >= kInvalidSlot && slot < num_slots, kCommit, "slot of draft ",
               draft, " is ", slot, "; must be -1 (padding) or between 0 and ",
               num_slots - 1);
  }

  const auto commit_row = [&](const PagedRows& cache, const HeadRows& staging,
                              int64_t draft, int64_t slot) {
    copy_heads(cache.slot(slot), cache.rows, staging.bytes + draft * staging.row_stride,
               staging, args.element_bytes);
  };
  for (int64_t draft = 0; draft < args.num_drafts; ++draft) {
    const int64_t slot = args.log_slots[draft];
    if (slot >= 0 && is_draft(args.log_windows, draft) &&
        is_accepted(args.log_windows, draft, args.acceptance)) {
      commit_row(args.key_cache, args.staging_key, draft, slot);
      commit_row(args.value_cache, args.staging_value, draft, slot);
    }
  }
}

}  // namespace nwor
