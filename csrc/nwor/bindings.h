// SPDX-License-Identifier: Apache-2.0
//
// The ops as PyTorch calls them. Definitions: cow_bindings.cpp (log and
// restore), stage_bindings.cpp, single_bindings.cpp; registration and schemas:
// torch_bindings.cpp.
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
void log_cache_slots_single(Tensor kv_cache, Tensor slots, Tensor undo_log);
void restore_rejected_drafts_single(Tensor kv_cache, Tensor slots, Tensor rejected_mask,
                                    Tensor undo_log);
void stage(Tensor key, Tensor value, Tensor slot_mapping, Tensor logits_indices,
           Tensor cu_num_logits, Tensor staging_key, Tensor staging_value,
           Tensor log_slots, Tensor log_windows, int64_t num_drafts);
void commit_draft_layer(Tensor staging_key, Tensor staging_value, Tensor log_slots,
                        Tensor log_windows, OptionalTensor sampled_token_ids,
                        int64_t vocab_size, OptionalTensor num_rejected,
                        Tensor key_cache, Tensor value_cache, int64_t num_drafts);

}  // namespace nwor
