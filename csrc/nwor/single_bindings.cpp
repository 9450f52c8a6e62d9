// SPDX-License-Identifier: Apache-2.0
//
// The `.single` overloads, the oracles of the tests: one cache tensor whose
// mutation PyTorch can see, one list of slots.
#include "bindings.h"
#include "dispatch.h"

namespace nwor {
namespace {

using torch::headeronly::ScalarType;

SingleArgs single_args(const TensorArgs& tensors, const Tensor& kv_cache,
                       const Tensor& slots, const Tensor& undo_log) {
  const int64_t num_dims = kv_cache.dim();
  NWOR_CHECK(num_dims == 3 || num_dims == 4, tensors.op(), "kv_cache has ", num_dims,
             " dimensions; must have 4 [blocks, heads, block size, ",
             "bytes per head] or 3 [blocks, block size, bytes per slot]");
  NWOR_CHECK(kv_cache.stride(num_dims - 1) == 1, tensors.op(), "kv_cache has stride ",
             kv_cache.stride(num_dims - 1), " in its last dimension; must be 1");
  SingleArgs args{};
  args.element_bytes = static_cast<int64_t>(kv_cache.element_size());
  if (num_dims == 4) {
    args.cache = tensors.paged_rows("kv_cache", kv_cache);
  } else {
    NWOR_CHECK(kv_cache.size(0) > 0 && kv_cache.size(1) > 0, tensors.op(),
               "kv_cache is empty; must have a block and a slot");
    args.cache = {{static_cast<uint8_t*>(kv_cache.data_ptr()),
                   kv_cache.stride(1) * args.element_bytes, 0, args.element_bytes, 1,
                   kv_cache.size(2)},
                  kv_cache.stride(0) * args.element_bytes,
                  kv_cache.size(0),
                  kv_cache.size(1)};
  }
  tensors.array("slots", slots, ScalarType::Long, 1);
  tensors.array("undo_log", undo_log, ScalarType::Byte, 2);
  const HeadRows& rows = args.cache.rows;
  tensors.size_is("undo_log", undo_log, 1,
                  rows.num_heads * rows.head_size * args.element_bytes,
                  "the bytes of a slot of kv_cache");
  NWOR_CHECK(slots.size(0) <= undo_log.size(0), tensors.op(), "slots has ",
             slots.size(0), " entries; must have at most ", undo_log.size(0),
             ", the rows of undo_log");
  args.slots = static_cast<const int64_t*>(slots.data_ptr());
  args.log = static_cast<uint8_t*>(undo_log.data_ptr());
  args.log_row_stride = undo_log.stride(0);
  args.num_slots = slots.size(0);
  return args;
}

}  // namespace

void log_cache_slots_single(Tensor kv_cache, Tensor slots, Tensor undo_log) {
  const TensorArgs tensors("log_cache_slots.single", "kv_cache", kv_cache);
  const SingleArgs args = single_args(tensors, kv_cache, slots, undo_log);
  NWOR_DISPATCH(tensors, args, log_cache_slots_single);
}

void restore_rejected_drafts_single(Tensor kv_cache, Tensor slots, Tensor rejected_mask,
                                    Tensor undo_log) {
  const TensorArgs tensors("restore_rejected_drafts.single", "kv_cache", kv_cache);
  SingleArgs args = single_args(tensors, kv_cache, slots, undo_log);
  tensors.array("rejected_mask", rejected_mask, ScalarType::Bool, 1);
  tensors.size_is("rejected_mask", rejected_mask, 0, slots.size(0),
                  "the entries of slots");
  args.rejected_mask = static_cast<const bool*>(rejected_mask.data_ptr());
  NWOR_DISPATCH(tensors, args, restore_rejected_drafts_single);
}

}  // namespace nwor
