// SPDX-License-Identifier: Apache-2.0
//
// log_cache_slots and restore_rejected_drafts: from tensors to launchers.
#include "common/dispatch.h"
#include "transaction/ops.h"

namespace nwor {
namespace {

// The rest is a step's.
template <typename Args>
Args of_layers(const TensorArgs& tensors, const Tensor& table,
               const OptionalTensor& runs, const Tensor& undo_log,
               const Tensor& log_slots, const Tensor& log_windows) {
  Args args{};
  args.table = tensors.table(table);
  args.runs = tensors.runs(runs);
  args.log = tensors.undo_log(undo_log, log_slots, log_windows);
  return args;
}

void set_first_shadow_slot(const TensorArgs& tensors, LogArgs& args, int64_t slot) {
  NWOR_CHECK(slot >= 1, tensors.op(), "first_shadow_slot is ", slot,
             "; must be at least 1");
  args.first_shadow_slot = slot;
}

void launch_log(const TensorArgs& tensors, LogArgs& args, const Tensor& slot_mapping,
                const Tensor& logits_indices, const Tensor& cu_num_logits,
                int64_t num_drafts, int64_t num_leading_zeros) {
  args.batch =
      tensors.batch(slot_mapping, logits_indices, cu_num_logits, num_leading_zeros);
  tensors.num_drafts(num_drafts, args.log);
  args.num_drafts = num_drafts;
  NWOR_DISPATCH(tensors, args, log_cache_slots);
}

void launch_restore(const TensorArgs& tensors, RestoreArgs& args,
                    const OptionalTensor& sampled_token_ids, int64_t vocab_size,
                    const OptionalTensor& num_rejected, int64_t num_drafts,
                    int64_t* counters_to) {
  args.acceptance = tensors.acceptance(sampled_token_ids, vocab_size, num_rejected);
  tensors.num_drafts(num_drafts, args.log);
  args.num_drafts = num_drafts;
  args.counters_to = counters_to;
  NWOR_DISPATCH(tensors, args, restore_rejected_drafts);
}

}  // namespace

void log_cache_slots(Tensor table, OptionalTensor runs, Tensor slot_mapping,
                     Tensor logits_indices, Tensor cu_num_logits, Tensor undo_log,
                     Tensor log_slots, Tensor log_windows, int64_t num_drafts,
                     int64_t first_shadow_slot, int64_t num_leading_zeros) {
  const TensorArgs tensors(kLog, "table", table);
  auto args =
      of_layers<LogArgs>(tensors, table, runs, undo_log, log_slots, log_windows);
  set_first_shadow_slot(tensors, args, first_shadow_slot);
  launch_log(tensors, args, slot_mapping, logits_indices, cu_num_logits, num_drafts,
             num_leading_zeros);
}

void restore_rejected_drafts(Tensor table, OptionalTensor runs, Tensor undo_log,
                             Tensor log_slots, Tensor log_windows,
                             OptionalTensor sampled_token_ids, int64_t vocab_size,
                             OptionalTensor num_rejected, Tensor counters,
                             int64_t num_drafts, OptionalTensor counters_to) {
  const TensorArgs tensors(kRestore, "table", table);
  auto args =
      of_layers<RestoreArgs>(tensors, table, runs, undo_log, log_slots, log_windows);
  args.counters = tensors.counters(counters);
  launch_restore(tensors, args, sampled_token_ids, vocab_size, num_rejected, num_drafts,
                 tensors.counters_to(counters_to));
}

LoggedLayers::LoggedLayers(Tensor source, OptionalTensor source_runs, Tensor table,
                           OptionalTensor runs, Tensor undo_log, Tensor log_slots,
                           Tensor log_windows, Tensor counters, Tensor ring,
                           int64_t first_shadow_slot)
    : log_tensors_(kLog, "table", source),
      restore_tensors_(kRestore, "table", table),
      log_(of_layers<LogArgs>(log_tensors_, source, source_runs, undo_log, log_slots,
                              log_windows)),
      restore_(of_layers<RestoreArgs>(restore_tensors_, table, runs, undo_log,
                                      log_slots, log_windows)),
      ring_(restore_tensors_.ring(ring)) {
  set_first_shadow_slot(log_tensors_, log_, first_shadow_slot);
  restore_.counters = restore_tensors_.counters(counters);
}

void LoggedLayers::log(Tensor slot_mapping, Tensor logits_indices, Tensor cu_num_logits,
                       int64_t num_drafts, int64_t num_leading_zeros) {
  launch_log(log_tensors_, log_, slot_mapping, logits_indices, cu_num_logits,
             num_drafts, num_leading_zeros);
}

void LoggedLayers::restore(OptionalTensor sampled_token_ids, int64_t vocab_size,
                           OptionalTensor num_rejected, int64_t num_drafts,
                           int64_t slot) {
  launch_restore(restore_tensors_, restore_, sampled_token_ids, vocab_size,
                 num_rejected, num_drafts, restore_tensors_.slot_of(ring_, slot));
}

}  // namespace nwor
