// SPDX-License-Identifier: Apache-2.0
//
// Schemas and registration, by libtorch's stable ABI: one build serves PyTorch
// 2.11 and later. A FRAGMENT, because CUDA builds of vLLM own the namespace.
// Fakes are registered in vllm/v1/nwor/ops.py.
//
// The table of addresses hides from PyTorch which caches an op reads and writes.
#include <torch/csrc/stable/library.h>

#include "bindings.h"

// How the audit's ops take a batch. The tables that they write are described in
// `tables`; none writes a cache.
#define NWOR_AUDIT_BATCH                                                          \
  "Tensor tables, Tensor row_seats, Tensor query_start_loc, Tensor block_table, " \
  "int num_reqs, "

STABLE_TORCH_LIBRARY_FRAGMENT(_C_cache_ops, ops) {
  ops.def(
      "log_cache_slots(Tensor table, Tensor? runs, Tensor slot_mapping, "
      "Tensor logits_indices, Tensor cu_num_logits, Tensor(a!) undo_log, "
      "Tensor(b!) log_slots, Tensor(c!) log_windows, int num_drafts) -> ()");
  ops.def(
      "restore_rejected_drafts(Tensor table, Tensor? runs, Tensor undo_log, "
      "Tensor log_slots, Tensor log_windows, Tensor? sampled_token_ids, "
      "int vocab_size, Tensor? num_rejected, Tensor(a!) counters, "
      "int num_drafts, Tensor(b!)? counters_to=None) -> ()");
  ops.def(
      "stage(Tensor table, Tensor? runs, Tensor(a!) block_table, "
      "Tensor(b!) slot_mapping, Tensor query_start_loc, Tensor seq_lens, "
      "Tensor cu_num_logits, Tensor? seats, Tensor(c!) saved, int first_entry, "
      "int num_real_entries, int span, int entry_tokens, int step, "
      "bool patches) -> ()");
  ops.def(
      "commit_draft_layer(Tensor table, Tensor? runs, Tensor(a!) block_table, "
      "Tensor(b!) slot_mapping, Tensor? seats, Tensor(c!) saved, "
      "Tensor? sampled_token_ids, int vocab_size, Tensor? num_rejected, "
      "Tensor(d!) counters, int num_reqs, int entry_tokens, bool undoes, "
      "Tensor(e!)? counters_to=None) -> ()");
  ops.def(
      "unstage(Tensor(a!) block_table, Tensor(b!) slot_mapping, Tensor? seats, "
      "Tensor saved, int num_reqs, int entry_tokens) -> ()");
  ops.def(
      "audit_describe(Tensor(a!) tables, Tensor records, Tensor seats, "
      "Tensor expected, Tensor owners, Tensor plan, Tensor findings, Tensor stores, "
      "int block_size, int entry_tokens, int window) -> ()");
  ops.def(
      "audit_describe_layers(Tensor(a!) tables, int index, Tensor table, "
      "Tensor? runs, Tensor contents, int first_column) -> ()");
  ops.def(
      "audit_seat(Tensor tables, Tensor tokens, int length, int seat, "
      "int generation, int seed, bool opaque, int loads, int hit_length) -> ()");
  ops.def("audit_plan(" NWOR_AUDIT_BATCH
          "Tensor tokens, Tensor positions, Tensor slot_mapping, int num_tokens, "
          "int step) -> ()");
  ops.def("audit_resolve(" NWOR_AUDIT_BATCH
          "Tensor? cu_num_logits, Tensor? sampled_token_ids, int vocab_size, "
          "Tensor? num_rejected, int num_tokens, int step, bool is_undone, "
          "int num_blocks, Tensor(a!)? findings_to=None) -> ()");
  ops.def("audit_adopt(" NWOR_AUDIT_BATCH
          "Tensor tokens, int length, int row, int step, int num_blocks) -> ()");
  ops.def("audit_scan(" NWOR_AUDIT_BATCH "int num_blocks, int step) -> ()");
  ops.def(
      "audit_hand_on(Tensor tables, Tensor blocks, Tensor numbers, int step, "
      "bool fills) -> ()");
  ops.def("audit_snapshot(Tensor tables, bool again) -> ()");
  ops.def("audit_hand_out(Tensor tables, Tensor blocks, Tensor generations) -> ()");
  ops.def("audit_publish(Tensor tables, Tensor(a!) findings_to) -> ()");
}

#define NWOR_REGISTER_ALL(ops)                                                    \
  ops.impl("log_cache_slots", TORCH_BOX(&nwor::log_cache_slots));                 \
  ops.impl("restore_rejected_drafts", TORCH_BOX(&nwor::restore_rejected_drafts)); \
  ops.impl("stage", TORCH_BOX(&nwor::stage));                                     \
  ops.impl("commit_draft_layer", TORCH_BOX(&nwor::commit_draft_layer));           \
  ops.impl("unstage", TORCH_BOX(&nwor::unstage));                                 \
  ops.impl("audit_describe", TORCH_BOX(&nwor::audit_describe));                   \
  ops.impl("audit_describe_layers", TORCH_BOX(&nwor::audit_describe_layers));     \
  ops.impl("audit_seat", TORCH_BOX(&nwor::audit_seat));                           \
  ops.impl("audit_plan", TORCH_BOX(&nwor::audit_plan));                           \
  ops.impl("audit_resolve", TORCH_BOX(&nwor::audit_resolve));                     \
  ops.impl("audit_adopt", TORCH_BOX(&nwor::audit_adopt));                         \
  ops.impl("audit_scan", TORCH_BOX(&nwor::audit_scan));                           \
  ops.impl("audit_hand_on", TORCH_BOX(&nwor::audit_hand_on));                     \
  ops.impl("audit_snapshot", TORCH_BOX(&nwor::audit_snapshot));                   \
  ops.impl("audit_hand_out", TORCH_BOX(&nwor::audit_hand_out));                   \
  ops.impl("audit_publish", TORCH_BOX(&nwor::audit_publish))

STABLE_TORCH_LIBRARY_IMPL(_C_cache_ops, CPU, ops) {
  NWOR_REGISTER_ALL(ops);
}

#ifdef NWOR_CUDA
STABLE_TORCH_LIBRARY_IMPL(_C_cache_ops, CUDA, ops) {
  NWOR_REGISTER_ALL(ops);
}
#endif
