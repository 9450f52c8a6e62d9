// SPDX-License-Identifier: Apache-2.0
//
// Schemas and registration, by libtorch's stable ABI: one build serves PyTorch
// 2.11 and later. A FRAGMENT, because CUDA builds of vLLM own the namespace.
// Fakes are registered in vllm/v1/nwor/ops.py.
//
// The table of addresses hides from PyTorch which caches an op reads and, in
// restore_rejected_drafts, writes. The `.single` overloads say so honestly.
#include <torch/csrc/stable/library.h>

#include "bindings.h"

STABLE_TORCH_LIBRARY_FRAGMENT(_C_cache_ops, ops) {
  ops.def(
      "log_cache_slots(Tensor table, Tensor? runs, Tensor slot_mapping, "
      "Tensor logits_indices, Tensor cu_num_logits, Tensor(a!) undo_log, "
      "Tensor(b!) log_slots, Tensor(c!) log_windows, int num_drafts) -> ()");
  ops.def(
      "log_cache_slots.single(Tensor kv_cache, Tensor slots, "
      "Tensor(a!) undo_log) -> ()");
  ops.def(
      "restore_rejected_drafts(Tensor table, Tensor? runs, Tensor undo_log, "
      "Tensor log_slots, Tensor log_windows, Tensor? sampled_token_ids, "
      "int vocab_size, Tensor? num_rejected, Tensor(a!) counters, "
      "int num_drafts, Tensor(b!)? counters_to=None) -> ()");
  ops.def(
      "restore_rejected_drafts.single(Tensor(a!) kv_cache, Tensor slots, "
      "Tensor rejected_mask, Tensor undo_log) -> ()");
  ops.def(
      "stage(Tensor key, Tensor value, Tensor slot_mapping, "
      "Tensor logits_indices, Tensor cu_num_logits, Tensor(a!) staging_key, "
      "Tensor(b!) staging_value, Tensor(c!) log_slots, "
      "Tensor(d!) log_windows, int num_drafts) -> ()");
  ops.def(
      "commit_draft_layer(Tensor staging_key, Tensor staging_value, "
      "Tensor log_slots, Tensor log_windows, Tensor? sampled_token_ids, "
      "int vocab_size, Tensor? num_rejected, Tensor(a!) key_cache, "
      "Tensor(b!) value_cache, int num_drafts) -> ()");
}

#define NWOR_REGISTER_ALL(ops)                                                    \
  ops.impl("log_cache_slots", TORCH_BOX(&nwor::log_cache_slots));                 \
  ops.impl("log_cache_slots.single", TORCH_BOX(&nwor::log_cache_slots_single));   \
  ops.impl("restore_rejected_drafts", TORCH_BOX(&nwor::restore_rejected_drafts)); \
  ops.impl("restore_rejected_drafts.single",                                      \
           TORCH_BOX(&nwor::restore_rejected_drafts_single));                     \
  ops.impl("stage", TORCH_BOX(&nwor::stage));                                     \
  ops.impl("commit_draft_layer", TORCH_BOX(&nwor::commit_draft_layer))

STABLE_TORCH_LIBRARY_IMPL(_C_cache_ops, CPU, ops) {
  NWOR_REGISTER_ALL(ops);
}

#ifdef NWOR_CUDA
STABLE_TORCH_LIBRARY_IMPL(_C_cache_ops, CUDA, ops) {
  NWOR_REGISTER_ALL(ops);
}
#endif
