// SPDX-License-Identifier: Apache-2.0
//
// The ops: from tensors to launchers. Definitions: cow_ops.cpp, shadow_ops.cpp and
// audit_ops.cpp. PyTorch's dispatcher leads to them (torch_bindings.cpp); what a step
// calls passes it by (python_bindings.cpp): the audit's ops, and LoggedLayers and
// StagedLayers, which make the other ops' launches for one table of layers, step after
// step: what no step changes is checked and kept once, so that a step brings, and
// fetches from memory, only what is its own.
#pragma once

#include "tensor_args.h"

namespace nwor {

void log_cache_slots(Tensor table, OptionalTensor runs, Tensor slot_mapping,
                     Tensor logits_indices, Tensor cu_num_logits, Tensor undo_log,
                     Tensor log_slots, Tensor log_windows, int64_t num_drafts,
                     int64_t first_shadow_slot, int64_t num_leading_zeros);
void restore_rejected_drafts(Tensor table, OptionalTensor runs, Tensor undo_log,
                             Tensor log_slots, Tensor log_windows,
                             OptionalTensor sampled_token_ids, int64_t vocab_size,
                             OptionalTensor num_rejected, Tensor counters,
                             int64_t num_drafts, OptionalTensor counters_to);
void stage(Tensor table, OptionalTensor runs, Tensor block_table, Tensor slot_mapping,
           Tensor query_start_loc, Tensor seq_lens, Tensor cu_num_logits,
           OptionalTensor state_indices, Tensor saved, int64_t first_entry,
           int64_t num_real_entries, int64_t span, int64_t entry_tokens,
           OptionalTensor seat_of_state, int64_t step, bool patches,
           bool rest_is_logged, int64_t num_leading_zeros);
void commit_draft_layer(Tensor table, OptionalTensor runs, Tensor block_table,
                        Tensor slot_mapping, OptionalTensor state_indices, Tensor saved,
                        OptionalTensor sampled_token_ids, int64_t vocab_size,
                        OptionalTensor num_rejected, Tensor counters, int64_t num_reqs,
                        int64_t entry_tokens, OptionalTensor seat_of_state, bool undoes,
                        OptionalTensor counters_to);
void unstage(Tensor block_table, Tensor slot_mapping, OptionalTensor state_indices,
             Tensor saved, int64_t num_reqs, int64_t entry_tokens,
             OptionalTensor seat_of_state);

// Arguments: as in the ops. What it is made of has to outlive it.
class LoggedLayers {
 public:
  static constexpr const char* kName = "LoggedLayers";
  // source, source_runs: the table that a log copies from. ring: [slots, 9] int64 on
  // the host: among its rows a step's counters_to is chosen, by its number; -1: none.
  LoggedLayers(Tensor source, OptionalTensor source_runs, Tensor table,
               OptionalTensor runs, Tensor undo_log, Tensor log_slots,
               Tensor log_windows, Tensor counters, Tensor ring,
               int64_t first_shadow_slot);
  void log(Tensor slot_mapping, Tensor logits_indices, Tensor cu_num_logits,
           int64_t num_drafts, int64_t num_leading_zeros);
  void restore(OptionalTensor sampled_token_ids, int64_t vocab_size,
               OptionalTensor num_rejected, int64_t num_drafts, int64_t slot);

 private:
  TensorArgs log_tensors_;
  TensorArgs restore_tensors_;
  LogArgs log_;
  RestoreArgs restore_;
  CounterRing ring_;
};

// As LoggedLayers. Block table, slot mapping and state indices that stage was called
// with have to stay until commit or unstage.
class StagedLayers {
 public:
  static constexpr const char* kName = "StagedLayers";
  StagedLayers(Tensor table, OptionalTensor runs, Tensor saved, Tensor counters,
               Tensor ring, int64_t first_entry, int64_t num_real_entries, int64_t span,
               int64_t entry_tokens, OptionalTensor seat_of_state, bool patches,
               bool undoes);
  void stage(Tensor block_table, Tensor slot_mapping, Tensor query_start_loc,
             Tensor seq_lens, Tensor cu_num_logits, OptionalTensor state_indices,
             int64_t step, bool rest_is_logged, int64_t num_leading_zeros);
  // Refused where no stage came before.
  void commit(OptionalTensor sampled_token_ids, int64_t vocab_size,
              OptionalTensor num_rejected, int64_t slot);
  // Does nothing where no step is staged: none was, its stage failed, or its commit
  // has put the tables back.
  void unstage();

 private:
  TensorArgs stage_tensors_;
  TensorArgs commit_tensors_;
  ShadowStageArgs stage_;
  ShadowCommitArgs commit_;
  CounterRing ring_;
  bool is_staged_ = false;
};

// The audit: audit_ops.cpp says what `tables` is.
void audit_seat(Tensor tables, Tensor tokens, int64_t seat, int64_t generation,
                int64_t seed, bool opaque, int64_t loads, Tensor features);
void audit_plan(Tensor tables, Tensor row_seats, Tensor query_start_loc,
                Tensor block_table, int64_t num_reqs, int64_t num_tokens, int64_t step,
                Tensor tokens, Tensor positions, Tensor slot_mapping);
void audit_resolve(Tensor tables, Tensor row_seats, Tensor query_start_loc,
                   Tensor block_table, int64_t num_reqs, int64_t num_tokens,
                   int64_t step, OptionalTensor cu_num_logits,
                   OptionalTensor sampled_token_ids, int64_t vocab_size,
                   OptionalTensor num_rejected, bool is_undone, OptionalTensor staged,
                   OptionalTensor state_indices, OptionalTensor seat_of_state,
                   OptionalTensor hits, int64_t num_blocks, int64_t num_hit_blocks,
                   Tensor findings_to);
void audit_blocks(Tensor tables, int64_t event, Tensor blocks, Tensor values,
                  int64_t step);
void audit_snapshot(Tensor tables, bool again);

// By name: the audit's, and all of them.
// clang-format off
#define NWOR_AUDIT_OPS(op) \
  op(audit_seat) op(audit_plan) op(audit_resolve) op(audit_blocks) \
  op(audit_snapshot)
#define NWOR_OPS(op) \
  op(log_cache_slots) op(restore_rejected_drafts) \
  op(stage) op(commit_draft_layer) op(unstage) NWOR_AUDIT_OPS(op)
// clang-format on

}  // namespace nwor
