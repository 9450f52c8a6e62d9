// SPDX-License-Identifier: Apache-2.0
//
// The ops: from tensors to launchers. Definitions: cow_ops.cpp, shadow_ops.cpp and
// audit_ops.cpp. Two ways lead to them: python_bindings.cpp, which a step takes, and
// PyTorch's dispatcher, torch_bindings.cpp.
#pragma once

#include "tensor_args.h"

namespace nwor {

void log_cache_slots(Tensor table, OptionalTensor runs, Tensor slot_mapping,
                     Tensor logits_indices, Tensor cu_num_logits, Tensor undo_log,
                     Tensor log_slots, Tensor log_windows, int64_t num_drafts,
                     int64_t num_leading_zeros);
void restore_rejected_drafts(Tensor table, OptionalTensor runs, Tensor undo_log,
                             Tensor log_slots, Tensor log_windows,
                             OptionalTensor sampled_token_ids, int64_t vocab_size,
                             OptionalTensor num_rejected, Tensor counters,
                             int64_t num_drafts, OptionalTensor counters_to);
void stage(Tensor table, OptionalTensor runs, Tensor block_table, Tensor slot_mapping,
           Tensor query_start_loc, Tensor seq_lens, Tensor cu_num_logits,
           OptionalTensor seats, Tensor saved, int64_t first_entry,
           int64_t num_real_entries, int64_t span, int64_t entry_tokens, int64_t step,
           bool patches, int64_t num_leading_zeros);
void commit_draft_layer(Tensor table, OptionalTensor runs, Tensor block_table,
                        Tensor slot_mapping, OptionalTensor seats, Tensor saved,
                        OptionalTensor sampled_token_ids, int64_t vocab_size,
                        OptionalTensor num_rejected, Tensor counters, int64_t num_reqs,
                        int64_t entry_tokens, bool undoes, OptionalTensor counters_to);
void unstage(Tensor block_table, Tensor slot_mapping, OptionalTensor seats,
             Tensor saved, int64_t num_reqs, int64_t entry_tokens);

// The audit: audit_ops.cpp says what `tables` is.
void audit_seat(Tensor tables, Tensor tokens, int64_t seat, int64_t generation,
                int64_t seed, bool opaque, int64_t loads);
void audit_plan(Tensor tables, Tensor row_seats, Tensor query_start_loc,
                Tensor block_table, int64_t num_reqs, int64_t num_tokens, int64_t step,
                Tensor tokens, Tensor positions, Tensor slot_mapping);
void audit_resolve(Tensor tables, Tensor row_seats, Tensor query_start_loc,
                   Tensor block_table, int64_t num_reqs, int64_t num_tokens,
                   int64_t step, OptionalTensor cu_num_logits,
                   OptionalTensor sampled_token_ids, int64_t vocab_size,
                   OptionalTensor num_rejected, bool is_undone, OptionalTensor hits,
                   int64_t num_blocks, int64_t num_hit_blocks, Tensor findings_to);
void audit_blocks(Tensor tables, int64_t event, Tensor blocks, Tensor values,
                  int64_t step);
void audit_snapshot(Tensor tables, bool again);

// All of them, by name.
// clang-format off
#define NWOR_OPS(op) \
  op(log_cache_slots) op(restore_rejected_drafts) \
  op(stage) op(commit_draft_layer) op(unstage) \
  op(audit_seat) op(audit_plan) op(audit_resolve) op(audit_blocks) \
  op(audit_snapshot)
// clang-format on

}  // namespace nwor
