// SPDX-License-Identifier: Apache-2.0
//
// The audit's ops: from tensors to launchers; audit_ops.cpp defines them and says what
// `tables` is.
#pragma once

#include "common/tensor.h"

namespace nwor {

void audit_seat(Tensor tables, Tensor tokens, int64_t seat, int64_t generation,
                int64_t seed, bool opaque, int64_t loads, int64_t handover,
                Tensor features);
void audit_plan(Tensor tables, Tensor row_seats, Tensor query_start_loc,
                Tensor block_table, int64_t num_reqs, int64_t num_tokens, int64_t step,
                Tensor tokens, Tensor positions, Tensor slot_mapping);
void audit_reseed(Tensor tables, int64_t seat, int64_t delta, int64_t num_tokens);
void audit_resolve(Tensor tables, Tensor row_seats, Tensor query_start_loc,
                   Tensor block_table, int64_t num_reqs, int64_t num_tokens,
                   int64_t step, OptionalTensor cu_num_logits,
                   OptionalTensor sampled_token_ids, int64_t vocab_size,
                   OptionalTensor num_rejected, bool is_undone, OptionalTensor staged,
                   OptionalTensor state_indices, OptionalTensor seat_of_state,
                   OptionalTensor hits, int64_t num_blocks, int64_t num_hit_blocks,
                   Tensor findings_to, OptionalTensor digests_to);
void audit_blocks(Tensor tables, int64_t event, Tensor blocks, Tensor values,
                  int64_t step);
void audit_snapshot(Tensor tables, bool again);
void audit_states_read(Tensor tables, Tensor row_seats, Tensor query_start_loc,
                       Tensor block_table, int64_t num_reqs, int64_t num_tokens,
                       int64_t step, Tensor state_tables, Tensor metadata);
void audit_states_written(Tensor tables, Tensor row_seats, Tensor query_start_loc,
                          Tensor block_table, int64_t num_reqs, int64_t num_tokens,
                          int64_t step, Tensor state_tables, Tensor metadata,
                          OptionalTensor cu_num_logits,
                          OptionalTensor sampled_token_ids, int64_t vocab_size,
                          OptionalTensor num_rejected, OptionalTensor digests_to);

// By name.
// clang-format off
#define NWOR_AUDIT_OPS(op) \
  op(audit_seat) op(audit_plan) op(audit_reseed) op(audit_resolve) \
  op(audit_blocks) op(audit_snapshot) \
  op(audit_states_read) op(audit_states_written)
// clang-format on

}  // namespace nwor
