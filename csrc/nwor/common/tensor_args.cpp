// SPDX-License-Identifier: Apache-2.0
#include "common/tensor_args.h"

#include <sstream>
#include <string>

#include "common/check.h"
#include "common/dispatch.h"

namespace nwor {
namespace {

using torch::headeronly::ScalarType;

std::string device_name(int32_t type, int32_t index) {
  if (type == kCpu) {
    return "cpu";
  }
  std::ostringstream text;
  if (type == kCuda) {
    text << "cuda:" << index;
  } else {
    text << "device type " << type;
  }
  return text.str();
}

std::string shape_of(const Tensor& tensor) {
  std::ostringstream text;
  text << "[";
  for (int64_t i = 0; i < tensor.num_dims; ++i) {
    text << (i ? ", " : "") << tensor.size(i);
  }
  text << "]";
  return text.str();
}

}  // namespace

TensorArgs::TensorArgs(const char* op, const char* name, const Tensor& reference)
    : TensorArgs(op, name, reference.device_type, reference.device_index) {}

TensorArgs::TensorArgs(const char* op, const char* name, int32_t device_type,
                       int32_t device_index)
    : op_(op),
      reference_name_(name),
      device_type_(device_type),
      device_index_(device_index) {}

void TensorArgs::same_device(const char* name, const Tensor& tensor) const {
  const int32_t type = tensor.device_type;
  const int32_t index = tensor.device_index;
  NWOR_CHECK(type == device_type_ && (!on_cuda() || index == device_index_), op_, name,
             " is on ", device_name(type, index), "; must be on ",
             device_name(device_type_, device_index_), ", where ", reference_name_,
             " is");
}

void TensorArgs::array_of(const char* name, const Tensor& tensor, ScalarType dtype,
                          int64_t num_dims) const {
  same_device(name, tensor);
  NWOR_CHECK(tensor.dtype == dtype, op_, name, " has dtype ",
             torch::headeronly::toString(tensor.dtype), "; must be ",
             torch::headeronly::toString(dtype));
  NWOR_CHECK(tensor.num_dims == num_dims, op_, name, " has shape ", shape_of(tensor),
             "; must have ", num_dims, " dimensions");
}

void TensorArgs::array(const char* name, const Tensor& tensor, ScalarType dtype,
                       int64_t num_dims) const {
  array_of(name, tensor, dtype, num_dims);
  NWOR_CHECK(tensor.is_contiguous(), op_, name, " has shape ", shape_of(tensor),
             " and is not contiguous; must be");
}

void TensorArgs::rows_of(const char* name, const Tensor& tensor,
                         ScalarType dtype) const {
  array_of(name, tensor, dtype, 2);
  NWOR_CHECK(tensor.size(1) <= 1 || tensor.stride(1) == 1, op_, name, " has stride ",
             tensor.stride(1), " in dimension 1; must be 1");
}

void TensorArgs::size_is(const char* name, const Tensor& tensor, int64_t dim,
                         int64_t size, const char* meaning) const {
  NWOR_CHECK(tensor.size(dim) == size, op_, name, " has shape ", shape_of(tensor),
             "; dimension ", dim, " must be ", size, ", ", meaning);
}

void TensorArgs::num_drafts(int64_t num_drafts, const UndoLog& log) const {
  NWOR_CHECK(num_drafts >= 0 && num_drafts <= log.capacity, op_, "num_drafts is ",
             num_drafts, "; must be between 0 and ", log.capacity,
             ", the capacity of undo_log");
}

LayerTable TensorArgs::table(const Tensor& table) const {
  const auto* const rows = values<int64_t>("table", table, 2);
  size_is("table", table, 1, kNumTableColumns, "its columns");
  NWOR_CHECK(table.size(0) > 0, op_,
             "table has shape [0, 9]; must have a row for each layer");
  return {reinterpret_cast<const LayerRow*>(rows), table.size(0)};
}

RunList TensorArgs::runs(const OptionalTensor& runs) const {
  if (!runs.has_value()) {
    return {nullptr, 0, 0};
  }
  NWOR_CHECK(!on_cuda(), op_,
             "runs is given; must be None on CUDA: packed layouts are "
             "supported on the CPU only");
  const auto* const pairs = values<int32_t>("runs", *runs, 3);
  size_is("runs", *runs, 2, 2, "offset and length");
  NWOR_CHECK(runs->size(0) > 0 && runs->size(1) > 0, op_, "runs has shape ",
             shape_of(*runs), "; must have a slot and a run");
  return {pairs, runs->size(0), runs->size(1)};
}

IndexArray TensorArgs::indices(const char* name, const Tensor& indices) const {
  const bool is_int64 = indices.dtype == ScalarType::Long;
  NWOR_CHECK(is_int64 || indices.dtype == ScalarType::Int, op_, name, " has dtype ",
             torch::headeronly::toString(indices.dtype), "; must be Int or Long");
  array(name, indices, indices.dtype, 1);
  return {indices.data, is_int64};
}

int64_t* TensorArgs::slot_mapping(const Tensor& slot_mapping,
                                  int64_t* num_tokens) const {
  const bool is_row = slot_mapping.num_dims == 2 && slot_mapping.size(0) == 1;
  auto* const slots = values<int64_t>("slot_mapping", slot_mapping, is_row ? 2 : 1);
  *num_tokens = slot_mapping.size(is_row ? 1 : 0);
  return slots;
}

const int32_t* TensorArgs::cu_num_logits(const Tensor& cu_num_logits,
                                         int64_t num_leading_zeros,
                                         int64_t* num_reqs) const {
  const auto* const sums = values<int32_t>("cu_num_logits", cu_num_logits);
  const int64_t size = cu_num_logits.size(0);
  NWOR_CHECK(num_leading_zeros >= 0 && num_leading_zeros <= size, op_,
             "num_leading_zeros is ", num_leading_zeros, "; must be between 0 and ",
             size, ", the entries of cu_num_logits");
  *num_reqs = size - num_leading_zeros;
  return sums + num_leading_zeros;
}

BatchWindows TensorArgs::batch(const Tensor& slot_mapping, const Tensor& logits_indices,
                               const Tensor& cu_num_logits,
                               int64_t num_leading_zeros) const {
  int64_t num_tokens = 0;
  const int64_t* slots = this->slot_mapping(slot_mapping, &num_tokens);
  int64_t num_reqs = 0;
  const int32_t* sums =
      this->cu_num_logits(cu_num_logits, num_leading_zeros, &num_reqs);
  return {slots,
          num_tokens,
          indices("logits_indices", logits_indices),
          logits_indices.size(0),
          sums,
          num_reqs};
}

UndoLog TensorArgs::undo_log(const Tensor& undo_log, const Tensor& log_slots,
                             const Tensor& log_windows) const {
  rows_of("undo_log", undo_log, ScalarType::Byte);
  NWOR_CHECK(undo_log.size(0) <= 1 || undo_log.stride(0) >= undo_log.size(1), op_,
             "undo_log has stride ", undo_log.stride(0),
             " in dimension 0; must be at least ", undo_log.size(1),
             ", rows must not overlap");
  constexpr const char* kCapacity = "the capacity of undo_log";
  auto* const slots = values<int64_t>("log_slots", log_slots);
  auto* const windows = values<int32_t>("log_windows", log_windows, 2);
  size_is("log_slots", log_slots, 0, undo_log.size(0), kCapacity);
  size_is("log_windows", log_windows, 0, undo_log.size(0), kCapacity);
  size_is("log_windows", log_windows, 1, 3, "request, position, drafts");
  return {static_cast<uint8_t*>(undo_log.data),
          undo_log.stride(0),
          undo_log.size(1),
          undo_log.size(0),
          slots,
          windows};
}

Acceptance TensorArgs::acceptance(const OptionalTensor& sampled_token_ids,
                                  int64_t vocab_size,
                                  const OptionalTensor& num_rejected) const {
  NWOR_CHECK(sampled_token_ids.has_value() != num_rejected.has_value(), op_,
             sampled_token_ids.has_value() ? "both" : "neither",
             " of sampled_token_ids and num_rejected given; must be exactly "
             "one");
  Acceptance result{};
  if (num_rejected.has_value()) {
    result.num_rejected = values<int32_t>("num_rejected", *num_rejected);
    result.num_reqs = num_rejected->size(0);
    return result;
  }
  array_of("sampled_token_ids", *sampled_token_ids, ScalarType::Int, 2);
  NWOR_CHECK(sampled_token_ids->size(1) > 0, op_, "sampled_token_ids has shape ",
             shape_of(*sampled_token_ids), "; must have a column");
  NWOR_CHECK(vocab_size > 0, op_, "vocab_size is ", vocab_size, "; must be at least 1");
  result.sampled_token_ids = static_cast<const int32_t*>(sampled_token_ids->data);
  result.row_stride = sampled_token_ids->stride(0);
  result.column_stride = sampled_token_ids->stride(1);
  result.num_columns = sampled_token_ids->size(1);
  result.vocab_size = vocab_size;
  result.num_reqs = sampled_token_ids->size(0);
  return result;
}

int64_t* TensorArgs::counters(const Tensor& counters) const {
  auto* const first = values<int64_t>("counters", counters);
  size_is("counters", counters, 0, kNumCounters, "its columns");
  return first;
}

int64_t* TensorArgs::host_counters(const char* name, const Tensor& counters,
                                   int64_t num_dims) const {
  const int32_t type = counters.device_type;
  NWOR_CHECK(type == kCpu, op_, name, " is on ",
             device_name(type, counters.device_index), "; must be on cpu");
  NWOR_CHECK(counters.dtype == ScalarType::Long, op_, name, " has dtype ",
             torch::headeronly::toString(counters.dtype), "; must be Long");
  NWOR_CHECK(
      counters.num_dims == num_dims && counters.size(num_dims - 1) == kNumCounters &&
          counters.stride(num_dims - 1) == 1,
      op_, name, " has shape ", shape_of(counters), "; must be [",
      num_dims == 1 ? "" : "slots, ", static_cast<int>(kNumCounters), "], contiguous");
  auto* const first = static_cast<int64_t*>(counters.data);
#ifdef NWOR_CUDA
  if (on_cuda()) {
    check_device_sees(op_, name, first);
  }
#endif
  return first;
}

int64_t* TensorArgs::counters_to(const OptionalTensor& counters_to) const {
  return counters_to.has_value() ? host_counters("counters_to", *counters_to, 1)
                                 : nullptr;
}

CounterRing TensorArgs::ring(const Tensor& ring) const {
  int64_t* const first = host_counters("ring", ring, 2);
  return {first, ring.size(0), ring.stride(0)};
}

int64_t* TensorArgs::slot_of(const CounterRing& ring, int64_t slot) const {
  NWOR_CHECK(slot >= -1 && slot < ring.num_slots, op_, "slot is ", slot,
             "; must be from -1 to ", ring.num_slots - 1, ", the last of ring");
  return slot < 0 ? nullptr : ring.at(slot);
}

BlockTable TensorArgs::block_table(const Tensor& block_table,
                                   const Tensor& slot_mapping) const {
  rows_of("block_table", block_table, ScalarType::Int);
  int64_t num_tokens = 0;
  int64_t* slots = this->slot_mapping(slot_mapping, &num_tokens);
  return {static_cast<int32_t*>(block_table.data),
          block_table.size(0),
          block_table.stride(0),
          block_table.size(1),
          slots,
          num_tokens};
}

SavedWindows TensorArgs::saved(const Tensor& saved) const {
  auto* const rows = values<int32_t>("saved", saved, 2);
  const int64_t span = (saved.size(1) - kSavedEntries) / 2;
  NWOR_CHECK(span >= 1 && saved.size(1) == kSavedEntries + 2 * span, op_,
             "saved has shape ", shape_of(saved), "; dimension 1 must be ",
             kSavedEntries + 0, " + 2 * span, span at least 1");
  return {rows, saved.size(0), span, {}, nullptr, 0};
}

void TensorArgs::set_seats(SavedWindows& saved,
                           const OptionalTensor& seat_of_state) const {
  if (seat_of_state.has_value()) {
    saved.seat_of_state = values<int32_t>("seat_of_state", *seat_of_state);
    saved.num_states = seat_of_state->size(0);
  }
}

IndexArray TensorArgs::state_indices(const OptionalTensor& state_indices,
                                     int64_t num_reqs) const {
  NWOR_CHECK(num_reqs >= 0, op_, "num_reqs is ", num_reqs, "; must be at least 0");
  if (!state_indices.has_value()) {
    return {};
  }
  const IndexArray found = indices("state_indices", *state_indices);
  size_is("state_indices", *state_indices, 0, num_reqs, "one for each request");
  return found;
}

}  // namespace nwor
