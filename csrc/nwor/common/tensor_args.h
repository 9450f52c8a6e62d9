// SPDX-License-Identifier: Apache-2.0
//
// From tensors to launcher arguments: dtype, device, shape and stride checks,
// then raw pointers. No value of a tensor is read here.
#pragma once

#include <cstdint>

#include "common/saved_windows.h"
#include "common/table.h"
#include "common/tensor.h"
#include "common/window.h"

namespace nwor {

// Checks the arguments of one call: each is named, and all share a device.
class TensorArgs {
 public:
  // The other tensors must be on the device of `reference`.
  TensorArgs(const char* op, const char* name, const Tensor& reference);
  TensorArgs(const char* op, const char* name, int32_t device_type,
             int32_t device_index);

  const char* op() const { return op_; }
  bool on_cuda() const { return device_type_ != kCpu; }
  int32_t device_type() const { return device_type_; }
  int device_index() const { return device_index_; }

  void same_device(const char* name, const Tensor& tensor) const;
  // Same device, dtype and number of dimensions; array() also: contiguous.
  void array(const char* name, const Tensor& tensor,
             torch::headeronly::ScalarType dtype, int64_t num_dims) const;
  void array_of(const char* name, const Tensor& tensor,
                torch::headeronly::ScalarType dtype, int64_t num_dims) const;
  // As array_of, of two dimensions: rows, which may be strided.
  void rows_of(const char* name, const Tensor& tensor,
               torch::headeronly::ScalarType dtype) const;
  // The elements of an array() of int32 or int64.
  template <typename Value>
  Value* values(const char* name, const Tensor& tensor, int64_t num_dims = 1) const {
    using torch::headeronly::ScalarType;
    constexpr auto kType = sizeof(Value) == 8 ? ScalarType::Long : ScalarType::Int;
    array(name, tensor, kType, num_dims);
    return static_cast<Value*>(tensor.data);
  }
  void size_is(const char* name, const Tensor& tensor, int64_t dim, int64_t size,
               const char* meaning) const;
  // Checks that the step's drafts fit the log.
  void num_drafts(int64_t num_drafts, const UndoLog& log) const;

  LayerTable table(const Tensor& table) const;
  RunList runs(const OptionalTensor& runs) const;
  IndexArray indices(const char* name, const Tensor& indices) const;
  // [num_leading_zeros + num_reqs]: those of the requests, how many to num_reqs.
  const int32_t* cu_num_logits(const Tensor& cu_num_logits, int64_t num_leading_zeros,
                               int64_t* num_reqs) const;
  BatchWindows batch(const Tensor& slot_mapping, const Tensor& logits_indices,
                     const Tensor& cu_num_logits, int64_t num_leading_zeros) const;
  // undo_log [capacity, bytes], log_slots [capacity], log_windows [capacity, 3].
  UndoLog undo_log(const Tensor& undo_log, const Tensor& log_slots,
                   const Tensor& log_windows) const;
  Acceptance acceptance(const OptionalTensor& sampled_token_ids, int64_t vocab_size,
                        const OptionalTensor& num_rejected) const;
  int64_t* counters(const Tensor& counters) const;
  // [kNumCounters] on the host, where the device sees it, or nullptr.
  int64_t* counters_to(const OptionalTensor& counters_to) const;
  // The same, [slots, kNumCounters].
  CounterRing ring(const Tensor& ring) const;
  // A slot of it; nullptr for -1.
  int64_t* slot_of(const CounterRing& ring, int64_t slot) const;
  // [tokens] or [1, tokens].
  int64_t* slot_mapping(const Tensor& slot_mapping, int64_t* num_tokens) const;
  // block_table [rows, width], rows may be strided.
  BlockTable block_table(const Tensor& block_table, const Tensor& slot_mapping) const;
  // [num_seats, kSavedEntries + 2 * span]; without the seats of a step.
  SavedWindows saved(const Tensor& saved) const;
  // [num_reqs] or nothing, with room in `saved` for that many windows.
  void set_seats(SavedWindows& saved, const OptionalTensor& seat_of_state) const;
  IndexArray state_indices(const OptionalTensor& state_indices, int64_t num_reqs) const;

 private:
  int64_t* host_counters(const char* name, const Tensor& counters,
                         int64_t num_dims) const;

  const char* op_;
  const char* reference_name_;
  int32_t device_type_;
  int32_t device_index_;
};

}  // namespace nwor
