// SPDX-License-Identifier: Apache-2.0
//
// The transaction's ops: from tensors to launchers, defined in cow_ops.cpp and
// shadow_ops.cpp. PyTorch's dispatcher calls the functions (torch_bindings.cpp). A step
// calls LoggedLayers and StagedLayers (python_bindings.cpp), one object for each table
// of layers: what no step changes is checked once, in the constructor, and kept, so
// that a step passes, and reads from memory, only its own arguments.
#pragma once

#include "common/tensor_args.h"
#include "transaction/cow.h"
#include "transaction/shadow.h"

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

// Arguments: as in the ops. The tensors of the constructor have to outlive it.
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

// By name.
// clang-format off
#define NWOR_TRANSACTION_OPS(op) \
  op(log_cache_slots) op(restore_rejected_drafts) \
  op(stage) op(commit_draft_layer) op(unstage)
// clang-format on

}  // namespace nwor
