// SPDX-License-Identifier: Apache-2.0
//
// Schemas and registration, by libtorch's stable ABI: one build serves PyTorch
// 2.11 and later. A FRAGMENT, because CUDA builds of vLLM own the namespace.
// Fakes are registered in vllm/v1/nwor/ops.py.
//
// The table of addresses hides from PyTorch which caches an op reads and writes.
#include <torch/csrc/stable/library.h>

#include "bindings.h"

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
}

#define NWOR_REGISTER_ALL(ops)                                                    \
  ops.impl("log_cache_slots", TORCH_BOX(&nwor::log_cache_slots));                 \
  ops.impl("restore_rejected_drafts", TORCH_BOX(&nwor::restore_rejected_drafts)); \
  ops.impl("stage", TORCH_BOX(&nwor::stage));                                     \
  ops.impl("commit_draft_layer", TORCH_BOX(&nwor::commit_draft_layer));           \
  ops.impl("unstage", TORCH_BOX(&nwor::unstage))

STABLE_TORCH_LIBRARY_IMPL(_C_cache_ops, CPU, ops) {
  NWOR_REGISTER_ALL(ops);
}

#ifdef NWOR_CUDA
STABLE_TORCH_LIBRARY_IMPL(_C_cache_ops, CUDA, ops) {
  NWOR_REGISTER_ALL(ops);
}
#endif
