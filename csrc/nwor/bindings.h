// SPDX-License-Identifier: Apache-2.0
//
// The ops as PyTorch calls them. Definitions: cow_bindings.cpp (undo log) and
// shadow_bindings.cpp (shadow pages); registration and schemas: torch_bindings.cpp. The
// audit's: audit_bindings.cpp.
#pragma once

#include "tensor_args.h"

namespace nwor {

void log_cache_slots(Tensor table, OptionalTensor runs, Tensor slot_mapping,
                     Tensor logits_indices, Tensor cu_num_logits, Tensor undo_log,
                     Tensor log_slots, Tensor log_windows, int64_t num_drafts);
void restore_rejected_drafts(Tensor table, OptionalTensor runs, Tensor undo_log,
                             Tensor log_slots, Tensor log_windows,
                             OptionalTensor sampled_token_ids, int64_t vocab_size,
                             OptionalTensor num_rejected, Tensor counters,
                             int64_t num_drafts, OptionalTensor counters_to);
void stage(Tensor table, OptionalTensor runs, Tensor block_table, Tensor slot_mapping,
           Tensor query_start_loc, Tensor seq_lens, Tensor cu_num_logits,
           OptionalTensor seats, Tensor saved, int64_t first_entry,
           int64_t num_real_entries, int64_t span, int64_t entry_tokens, int64_t step,
           bool patches);
void commit_draft_layer(Tensor table, OptionalTensor runs, Tensor block_table,
                        Tensor slot_mapping, OptionalTensor seats, Tensor saved,
                        OptionalTensor sampled_token_ids, int64_t vocab_size,
                        OptionalTensor num_rejected, Tensor counters, int64_t num_reqs,
                        int64_t entry_tokens, bool undoes, OptionalTensor counters_to);
void unstage(Tensor block_table, Tensor slot_mapping, OptionalTensor seats,
             Tensor saved, int64_t num_reqs, int64_t entry_tokens);

}  // namespace nwor
