// SPDX-License-Identifier: Apache-2.0
//
// stage and commit_draft_layer: from tensors to launchers.
#include <algorithm>

#include "bindings.h"
#include "dispatch.h"

namespace nwor {
namespace {

void check_row_shape(const TensorArgs& tensors, const char* name, const Tensor& tensor,
                     int64_t heads_dim, int64_t size_dim, const HeadRows& expected,
                     const char* heads_meaning, const char* size_meaning) {
  tensors.size_is(name, tensor, heads_dim, expected.num_heads, heads_meaning);
  tensors.size_is(name, tensor, size_dim, expected.head_size, size_meaning);
}

}  // namespace

void stage(Tensor key, Tensor value, Tensor slot_mapping, Tensor logits_indices,
           Tensor cu_num_logits, Tensor staging_key, Tensor staging_value,
           Tensor log_slots, Tensor log_windows, int64_t num_drafts) {
  const TensorArgs tensors("stage", "key", key);
  StageArgs args{};
  args.key = tensors.head_rows("key", key);
  args.value = tensors.head_rows("value", value);
  args.staging_key = tensors.head_rows("staging_key", staging_key);
  args.staging_value = tensors.head_rows("staging_value", staging_value);
  args.element_bytes = static_cast<int64_t>(key.element_size());
  tensors.same_dtype("value", value, "key", key);
  tensors.same_dtype("staging_key", staging_key, "key", key);
  tensors.same_dtype("staging_value", staging_value, "key", key);
  check_row_shape(tensors, "staging_key", staging_key, 1, 2, args.key,
                  "the heads of key", "the head size of key");
  check_row_shape(tensors, "staging_value", staging_value, 1, 2, args.value,
                  "the heads of value", "the head size of value");
  const int64_t capacity = staging_key.size(0);
  tensors.size_is("staging_value", staging_value, 0, capacity,
                  "the capacity of staging_key");
  args.batch = tensors.batch(slot_mapping, logits_indices, cu_num_logits);
  NWOR_CHECK(key.size(0) == value.size(0), tensors.op(), "value has ", value.size(0),
             " tokens; must have ", key.size(0), ", as key");
  // Rows of key beyond slot_mapping, or the reverse, are a batch's padding.
  args.batch.num_tokens = std::min<int64_t>(args.batch.num_tokens, key.size(0));
  tensors.log_entries(log_slots, log_windows, capacity, "the capacity of staging_key");
  args.log_slots = static_cast<int64_t*>(log_slots.data_ptr());
  args.log_windows = static_cast<int32_t*>(log_windows.data_ptr());
  args.num_drafts = num_drafts;
  tensors.num_drafts(num_drafts, capacity, "staging_key");
  NWOR_DISPATCH(tensors, args, stage);
}

void commit_draft_layer(Tensor staging_key, Tensor staging_value, Tensor log_slots,
                        Tensor log_windows, OptionalTensor sampled_token_ids,
                        int64_t vocab_size, OptionalTensor num_rejected,
                        Tensor key_cache, Tensor value_cache, int64_t num_drafts) {
  const TensorArgs tensors("commit_draft_layer", "staging_key", staging_key);
  CommitArgs args{};
  args.staging_key = tensors.head_rows("staging_key", staging_key);
  args.staging_value = tensors.head_rows("staging_value", staging_value);
  args.key_cache = tensors.paged_rows("key_cache", key_cache);
  args.value_cache = tensors.paged_rows("value_cache", value_cache);
  args.element_bytes = static_cast<int64_t>(staging_key.element_size());
  tensors.same_dtype("staging_value", staging_value, "staging_key", staging_key);
  tensors.same_dtype("key_cache", key_cache, "staging_key", staging_key);
  tensors.same_dtype("value_cache", value_cache, "staging_key", staging_key);
  check_row_shape(tensors, "key_cache", key_cache, 1, 3, args.staging_key,
                  "the heads of staging_key", "the head size of staging_key");
  check_row_shape(tensors, "value_cache", value_cache, 1, 3, args.staging_value,
                  "the heads of staging_value", "the head size of staging_value");
  tensors.size_is("value_cache", value_cache, 0, key_cache.size(0),
                  "the blocks of key_cache");
  tensors.size_is("value_cache", value_cache, 2, key_cache.size(2),
                  "the block size of key_cache");
  const int64_t capacity = staging_key.size(0);
  tensors.size_is("staging_value", staging_value, 0, capacity,
                  "the capacity of staging_key");
  tensors.log_entries(log_slots, log_windows, capacity, "the capacity of staging_key");
  args.log_slots = static_cast<const int64_t*>(log_slots.data_ptr());
  args.log_windows = static_cast<const int32_t*>(log_windows.data_ptr());
  args.acceptance = tensors.acceptance(sampled_token_ids, vocab_size, num_rejected);
  args.num_drafts = num_drafts;
  tensors.num_drafts(num_drafts, capacity, "staging_key");
  NWOR_DISPATCH(tensors, args, commit_draft_layer);
}

}  // namespace nwor
