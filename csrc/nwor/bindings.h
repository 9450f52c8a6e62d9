// SPDX-License-Identifier: Apache-2.0
//
// The ops. Definitions: cow_bindings.cpp, shadow_bindings.cpp and audit_bindings.cpp;
// registration: torch_bindings.cpp; past PyTorch's dispatcher: builtins.cpp.
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

// The audit: audit_bindings.cpp says what `tables` is.
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

// All of them: op(name, arguments as PyTorch's schemas have them). The table of
// addresses hides from PyTorch which caches an op reads and writes; of the audit's ops,
// which take a step's batch alike, none writes a cache.
#define NWOR_AUDIT_BATCH                                                          \
  "Tensor tables, Tensor row_seats, Tensor query_start_loc, Tensor block_table, " \
  "int num_reqs, int num_tokens, int step, "

// clang-format off: it would indent each one further than the one before.
#define NWOR_OPS(op)                                                                   \
  op(log_cache_slots,                                                                  \
     "Tensor table, Tensor? runs, Tensor slot_mapping, Tensor logits_indices, "        \
     "Tensor cu_num_logits, Tensor(a!) undo_log, Tensor(b!) log_slots, Tensor(c!) "    \
     "log_windows, int num_drafts, int num_leading_zeros=0")                           \
  op(restore_rejected_drafts,                                                          \
     "Tensor table, Tensor? runs, Tensor undo_log, Tensor log_slots, Tensor "          \
     "log_windows, Tensor? sampled_token_ids, int vocab_size, Tensor? "                \
     "num_rejected, Tensor(a!) counters, int num_drafts, Tensor(b!)? "                 \
     "counters_to=None")                                                               \
  op(stage,                                                                            \
     "Tensor table, Tensor? runs, Tensor(a!) block_table, Tensor(b!) "                 \
     "slot_mapping, Tensor query_start_loc, Tensor seq_lens, Tensor "                  \
     "cu_num_logits, Tensor? seats, Tensor(c!) saved, int first_entry, int "           \
     "num_real_entries, int span, int entry_tokens, int step, bool patches, int "      \
     "num_leading_zeros=0")                                                            \
  op(commit_draft_layer,                                                               \
     "Tensor table, Tensor? runs, Tensor(a!) block_table, Tensor(b!) "                 \
     "slot_mapping, Tensor? seats, Tensor(c!) saved, Tensor? sampled_token_ids, "      \
     "int vocab_size, Tensor? num_rejected, Tensor(d!) counters, int num_reqs, "       \
     "int entry_tokens, bool undoes, Tensor(e!)? counters_to=None")                    \
  op(unstage,                                                                          \
     "Tensor(a!) block_table, Tensor(b!) slot_mapping, Tensor? seats, Tensor "         \
     "saved, int num_reqs, int entry_tokens")                                          \
  op(audit_seat,                                                                       \
     "Tensor tables, Tensor tokens, int seat, int generation, int seed, bool "         \
     "opaque, int loads")                                                              \
  op(audit_plan, NWOR_AUDIT_BATCH                                                      \
     "Tensor tokens, Tensor positions, Tensor slot_mapping")                           \
  op(audit_resolve, NWOR_AUDIT_BATCH                                                   \
     "Tensor? cu_num_logits, Tensor? sampled_token_ids, int vocab_size, Tensor? "      \
     "num_rejected, bool is_undone, Tensor? hits, int num_blocks, int "                \
     "num_hit_blocks, Tensor(a!) findings_to")                                         \
  op(audit_blocks,                                                                     \
     "Tensor tables, int event, Tensor blocks, Tensor values, int step")               \
  op(audit_snapshot,                                                                   \
     "Tensor tables, bool again")
// clang-format on

}  // namespace nwor
