// SPDX-License-Identifier: Apache-2.0
//
// stage, commit_draft_layer and unstage: from tensors to launchers.
#include "dispatch.h"
#include "ops.h"

namespace nwor {
namespace {

void has_rows(const TensorArgs& tensors, const BlockTable& blocks, int64_t num_reqs) {
  NWOR_CHECK(blocks.num_rows >= num_reqs, tensors.op(), "block_table has ",
             blocks.num_rows, " rows; must have one for each of ", num_reqs,
             " requests");
}

void entry_tokens_fit(const TensorArgs& tensors, int64_t entry_tokens) {
  NWOR_CHECK(entry_tokens > 0, tensors.op(), "entry_tokens is ", entry_tokens,
             "; must be at least 1");
}

}  // namespace

void stage(Tensor table, OptionalTensor runs, Tensor block_table, Tensor slot_mapping,
           Tensor query_start_loc, Tensor seq_lens, Tensor cu_num_logits,
           OptionalTensor seats, Tensor saved, int64_t first_entry,
           int64_t num_real_entries, int64_t span, int64_t entry_tokens, int64_t step,
           bool patches, int64_t num_leading_zeros) {
  const TensorArgs tensors("stage", "table", table);
  const LayerTable layers = tensors.table(table);
  const RunList run_list = tensors.runs(runs);
  const BlockTable blocks = tensors.block_table(block_table, slot_mapping);
  const auto* const starts =
      tensors.values<int32_t>("query_start_loc", query_start_loc);
  const auto* const lengths = tensors.values<int32_t>("seq_lens", seq_lens);
  int64_t num_reqs = 0;
  const int32_t* sums =
      tensors.cu_num_logits(cu_num_logits, num_leading_zeros, &num_reqs);
  const SavedWindows windows = tensors.saved(saved, seats, num_reqs);
  NWOR_CHECK(windows.span == span, tensors.op(), "span is ", span, "; must be ",
             windows.span, ", as the columns of saved say");
  NWOR_CHECK(query_start_loc.size(0) > num_reqs, tensors.op(), "query_start_loc has ",
             query_start_loc.size(0), " entries; must have ", num_reqs + 1,
             ", one more than cu_num_logits");
  NWOR_CHECK(seq_lens.size(0) >= num_reqs, tensors.op(), "seq_lens has ",
             seq_lens.size(0), " entries; must have ", num_reqs,
             ", as many as cu_num_logits");
  has_rows(tensors, blocks, num_reqs);
  entry_tokens_fit(tensors, entry_tokens);
  constexpr int64_t kMaxInt32 = 2147483647;
  NWOR_CHECK(step >= 1 && step <= kMaxInt32, tensors.op(), "step is ", step,
             "; must be from 1 to ", kMaxInt32);
  NWOR_CHECK(num_real_entries >= 1, tensors.op(), "num_real_entries is ",
             num_real_entries, "; must be at least 1");
  NWOR_CHECK(first_entry >= num_real_entries, tensors.op(), "first_entry is ",
             first_entry, "; must be at least ", num_real_entries,
             ", num_real_entries");
  NWOR_CHECK(first_entry <= kMaxInt32 - windows.num_seats * span, tensors.op(),
             "first_entry is ", first_entry, "; must leave room for ",
             windows.num_seats, " seats of ", span, " entries below ", kMaxInt32);
  const ShadowStageArgs args{layers,       run_list,    blocks,
                             starts,       lengths,     sums,
                             windows,      first_entry, num_real_entries,
                             entry_tokens, num_reqs,    static_cast<int32_t>(step),
                             patches};
  NWOR_DISPATCH(tensors, args, stage);
}

void commit_draft_layer(Tensor table, OptionalTensor runs, Tensor block_table,
                        Tensor slot_mapping, OptionalTensor seats, Tensor saved,
                        OptionalTensor sampled_token_ids, int64_t vocab_size,
                        OptionalTensor num_rejected, Tensor counters, int64_t num_reqs,
                        int64_t entry_tokens, bool undoes, OptionalTensor counters_to) {
  const TensorArgs tensors("commit_draft_layer", "table", table);
  const ShadowCommitArgs args{
      tensors.table(table),
      tensors.runs(runs),
      tensors.block_table(block_table, slot_mapping),
      tensors.saved(saved, seats, num_reqs),
      tensors.acceptance(sampled_token_ids, vocab_size, num_rejected),
      tensors.counters(counters),
      tensors.counters_to(counters_to),
      entry_tokens,
      num_reqs,
      undoes};
  has_rows(tensors, args.blocks, num_reqs);
  entry_tokens_fit(tensors, entry_tokens);
  NWOR_CHECK(args.acceptance.num_reqs >= num_reqs, tensors.op(),
             num_rejected.has_value() ? "num_rejected" : "sampled_token_ids", " has ",
             args.acceptance.num_reqs, " rows; must have ", num_reqs, ", num_reqs");
  NWOR_DISPATCH(tensors, args, commit_draft_layer);
}

void unstage(Tensor block_table, Tensor slot_mapping, OptionalTensor seats,
             Tensor saved, int64_t num_reqs, int64_t entry_tokens) {
  const TensorArgs tensors("unstage", "block_table", block_table);
  const ShadowUndoArgs args{tensors.block_table(block_table, slot_mapping),
                            tensors.saved(saved, seats, num_reqs), entry_tokens,
                            num_reqs};
  has_rows(tensors, args.blocks, num_reqs);
  entry_tokens_fit(tensors, entry_tokens);
  NWOR_DISPATCH(tensors, args, unstage);
}

}  // namespace nwor
