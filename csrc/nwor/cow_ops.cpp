// SPDX-License-Identifier: Apache-2.0
//
// log_cache_slots and restore_rejected_drafts: from tensors to launchers.
#include "dispatch.h"
#include "ops.h"

namespace nwor {

void log_cache_slots(Tensor table, OptionalTensor runs, Tensor slot_mapping,
                     Tensor logits_indices, Tensor cu_num_logits, Tensor undo_log,
                     Tensor log_slots, Tensor log_windows, int64_t num_drafts,
                     int64_t num_leading_zeros) {
  const TensorArgs tensors("log_cache_slots", "table", table);
  const LogArgs args{
      tensors.table(table), tensors.runs(runs),
      tensors.batch(slot_mapping, logits_indices, cu_num_logits, num_leading_zeros),
      tensors.undo_log(undo_log, log_slots, log_windows), num_drafts};
  tensors.num_drafts(num_drafts, undo_log.size(0));
  NWOR_DISPATCH(tensors, args, log_cache_slots);
}

void restore_rejected_drafts(Tensor table, OptionalTensor runs, Tensor undo_log,
                             Tensor log_slots, Tensor log_windows,
                             OptionalTensor sampled_token_ids, int64_t vocab_size,
                             OptionalTensor num_rejected, Tensor counters,
                             int64_t num_drafts, OptionalTensor counters_to) {
  const TensorArgs tensors("restore_rejected_drafts", "table", table);
  const RestoreArgs args{
      tensors.table(table),
      tensors.runs(runs),
      tensors.undo_log(undo_log, log_slots, log_windows),
      tensors.acceptance(sampled_token_ids, vocab_size, num_rejected),
      tensors.counters(counters),
      tensors.counters_to(counters_to),
      num_drafts};
  tensors.num_drafts(num_drafts, undo_log.size(0));
  NWOR_DISPATCH(tensors, args, restore_rejected_drafts);
}

}  // namespace nwor
