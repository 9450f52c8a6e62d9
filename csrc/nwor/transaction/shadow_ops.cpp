// SPDX-License-Identifier: Apache-2.0
//
// stage, commit_draft_layer and unstage: from tensors to launchers.
#include "common/dispatch.h"
#include "transaction/ops.h"

namespace nwor {
namespace {

int64_t checked_entry_tokens(const TensorArgs& tensors, int64_t entry_tokens) {
  NWOR_CHECK(entry_tokens > 0, tensors.op(), "entry_tokens is ", entry_tokens,
             "; must be at least 1");
  return entry_tokens;
}

// Without the state indices of a step.
SavedWindows saved_windows(const TensorArgs& tensors, const Tensor& saved,
                           const OptionalTensor& seat_of_state) {
  SavedWindows found = tensors.saved(saved);
  tensors.set_seats(found, seat_of_state);
  return found;
}

// The rest is a step's.
ShadowStageArgs stage_args(const TensorArgs& tensors, const Tensor& table,
                           const OptionalTensor& runs, const Tensor& saved,
                           int64_t first_entry, int64_t num_real_entries, int64_t span,
                           int64_t entry_tokens, const OptionalTensor& seat_of_state,
                           bool patches) {
  ShadowStageArgs args{};
  args.table = tensors.table(table);
  args.runs = tensors.runs(runs);
  args.saved = saved_windows(tensors, saved, seat_of_state);
  NWOR_CHECK(args.saved.span == span, tensors.op(), "span is ", span, "; must be ",
             args.saved.span, ", as the columns of saved say");
  NWOR_CHECK(num_real_entries >= 1, tensors.op(), "num_real_entries is ",
             num_real_entries, "; must be at least 1");
  NWOR_CHECK(first_entry >= num_real_entries, tensors.op(), "first_entry is ",
             first_entry, "; must be at least ", num_real_entries,
             ", num_real_entries");
  NWOR_CHECK(first_entry <= kMaxInt32 - args.saved.num_seats * span, tensors.op(),
             "first_entry is ", first_entry, "; must leave room for ",
             args.saved.num_seats, " seats of ", span, " entries below ", kMaxInt32);
  args.first_entry = first_entry;
  args.num_real_entries = num_real_entries;
  args.entry_tokens = checked_entry_tokens(tensors, entry_tokens);
  args.patches = patches;
  return args;
}

ShadowCommitArgs commit_args(const TensorArgs& tensors, const Tensor& table,
                             const OptionalTensor& runs, const Tensor& saved,
                             const Tensor& counters, int64_t entry_tokens,
                             const OptionalTensor& seat_of_state, bool undoes) {
  ShadowCommitArgs args{};
  args.table = tensors.table(table);
  args.runs = tensors.runs(runs);
  args.saved = saved_windows(tensors, saved, seat_of_state);
  args.counters = tensors.counters(counters);
  args.entry_tokens = checked_entry_tokens(tensors, entry_tokens);
  args.undoes = undoes;
  return args;
}

// What a step brings to each of the three.
template <typename Args>
void set_windows(const TensorArgs& tensors, Args& args, const Tensor& block_table,
                 const Tensor& slot_mapping, const OptionalTensor& state_indices,
                 int64_t num_reqs) {
  args.blocks = tensors.block_table(block_table, slot_mapping);
  args.saved.state_indices = tensors.state_indices(state_indices, num_reqs);
  args.num_reqs = num_reqs;
  NWOR_CHECK(args.blocks.num_rows >= num_reqs, tensors.op(), "block_table has ",
             args.blocks.num_rows, " rows; must have one for each of ", num_reqs,
             " requests");
}

void launch_stage(const TensorArgs& tensors, ShadowStageArgs& args,
                  const Tensor& block_table, const Tensor& slot_mapping,
                  const Tensor& query_start_loc, const Tensor& seq_lens,
                  const Tensor& cu_num_logits, const OptionalTensor& state_indices,
                  int64_t step, bool rest_is_logged, int64_t num_leading_zeros) {
  args.query_start_loc = tensors.values<int32_t>("query_start_loc", query_start_loc);
  args.seq_lens = tensors.values<int32_t>("seq_lens", seq_lens);
  int64_t num_reqs = 0;
  args.cu_num_logits =
      tensors.cu_num_logits(cu_num_logits, num_leading_zeros, &num_reqs);
  set_windows(tensors, args, block_table, slot_mapping, state_indices, num_reqs);
  NWOR_CHECK(query_start_loc.size(0) > num_reqs, tensors.op(), "query_start_loc has ",
             query_start_loc.size(0), " entries; must have ", num_reqs + 1,
             ", one more than cu_num_logits");
  NWOR_CHECK(seq_lens.size(0) >= num_reqs, tensors.op(), "seq_lens has ",
             seq_lens.size(0), " entries; must have ", num_reqs,
             ", as many as cu_num_logits");
  NWOR_CHECK(step >= 1 && step <= kMaxInt32, tensors.op(), "step is ", step,
             "; must be from 1 to ", kMaxInt32);
  args.step = static_cast<int32_t>(step);
  args.rest_is_logged = rest_is_logged;
  NWOR_DISPATCH(tensors, args, stage);
}

void launch_commit(const TensorArgs& tensors, ShadowCommitArgs& args,
                   const OptionalTensor& sampled_token_ids, int64_t vocab_size,
                   const OptionalTensor& num_rejected, int64_t* counters_to) {
  args.acceptance = tensors.acceptance(sampled_token_ids, vocab_size, num_rejected);
  args.counters_to = counters_to;
  NWOR_CHECK(args.acceptance.num_reqs >= args.num_reqs, tensors.op(),
             num_rejected.has_value() ? "num_rejected" : "sampled_token_ids", " has ",
             args.acceptance.num_reqs, " rows; must have ", args.num_reqs,
             ", num_reqs");
  NWOR_DISPATCH(tensors, args, commit_draft_layer);
}

}  // namespace

void stage(Tensor table, OptionalTensor runs, Tensor block_table, Tensor slot_mapping,
           Tensor query_start_loc, Tensor seq_lens, Tensor cu_num_logits,
           OptionalTensor state_indices, Tensor saved, int64_t first_entry,
           int64_t num_real_entries, int64_t span, int64_t entry_tokens,
           OptionalTensor seat_of_state, int64_t step, bool patches,
           bool rest_is_logged, int64_t num_leading_zeros) {
  const TensorArgs tensors(kStage, "table", table);
  ShadowStageArgs args =
      stage_args(tensors, table, runs, saved, first_entry, num_real_entries, span,
                 entry_tokens, seat_of_state, patches);
  launch_stage(tensors, args, block_table, slot_mapping, query_start_loc, seq_lens,
               cu_num_logits, state_indices, step, rest_is_logged, num_leading_zeros);
}

void commit_draft_layer(Tensor table, OptionalTensor runs, Tensor block_table,
                        Tensor slot_mapping, OptionalTensor state_indices, Tensor saved,
                        OptionalTensor sampled_token_ids, int64_t vocab_size,
                        OptionalTensor num_rejected, Tensor counters, int64_t num_reqs,
                        int64_t entry_tokens, OptionalTensor seat_of_state, bool undoes,
                        OptionalTensor counters_to) {
  const TensorArgs tensors(kCommit, "table", table);
  ShadowCommitArgs args = commit_args(tensors, table, runs, saved, counters,
                                      entry_tokens, seat_of_state, undoes);
  set_windows(tensors, args, block_table, slot_mapping, state_indices, num_reqs);
  launch_commit(tensors, args, sampled_token_ids, vocab_size, num_rejected,
                tensors.counters_to(counters_to));
}

void unstage(Tensor block_table, Tensor slot_mapping, OptionalTensor state_indices,
             Tensor saved, int64_t num_reqs, int64_t entry_tokens,
             OptionalTensor seat_of_state) {
  const TensorArgs tensors(kUnstage, "block_table", block_table);
  ShadowUndoArgs args{};
  args.saved = saved_windows(tensors, saved, seat_of_state);
  args.entry_tokens = checked_entry_tokens(tensors, entry_tokens);
  set_windows(tensors, args, block_table, slot_mapping, state_indices, num_reqs);
  NWOR_DISPATCH(tensors, args, unstage);
}

StagedLayers::StagedLayers(Tensor table, OptionalTensor runs, Tensor saved,
                           Tensor counters, Tensor ring, int64_t first_entry,
                           int64_t num_real_entries, int64_t span, int64_t entry_tokens,
                           OptionalTensor seat_of_state, bool patches, bool undoes)
    : stage_tensors_(kStage, "table", table),
      commit_tensors_(kCommit, "table", table),
      stage_(stage_args(stage_tensors_, table, runs, saved, first_entry,
                        num_real_entries, span, entry_tokens, seat_of_state, patches)),
      commit_(commit_args(commit_tensors_, table, runs, saved, counters, entry_tokens,
                          seat_of_state, undoes)),
      ring_(commit_tensors_.ring(ring)) {}

void StagedLayers::stage(Tensor block_table, Tensor slot_mapping,
                         Tensor query_start_loc, Tensor seq_lens, Tensor cu_num_logits,
                         OptionalTensor state_indices, int64_t step,
                         bool rest_is_logged, int64_t num_leading_zeros) {
  is_staged_ = false;
  launch_stage(stage_tensors_, stage_, block_table, slot_mapping, query_start_loc,
               seq_lens, cu_num_logits, state_indices, step, rest_is_logged,
               num_leading_zeros);
  commit_.blocks = stage_.blocks;
  commit_.saved.state_indices = stage_.saved.state_indices;
  commit_.num_reqs = stage_.num_reqs;
  is_staged_ = true;
}

void StagedLayers::commit(OptionalTensor sampled_token_ids, int64_t vocab_size,
                          OptionalTensor num_rejected, int64_t slot) {
  NWOR_CHECK(is_staged_, kCommit, "no step is staged; stage must come first");
  launch_commit(commit_tensors_, commit_, sampled_token_ids, vocab_size, num_rejected,
                commit_tensors_.slot_of(ring_, slot));
  is_staged_ = !commit_.undoes;
}

void StagedLayers::unstage() {
  if (is_staged_) {
    ShadowUndoArgs args{commit_.blocks, commit_.saved, commit_.entry_tokens,
                        commit_.num_reqs};
    NWOR_DISPATCH(commit_tensors_, args, unstage);
    is_staged_ = false;
  }
}

}  // namespace nwor
