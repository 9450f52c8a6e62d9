// SPDX-License-Identifier: Apache-2.0
//
// Registers the transaction's ops with libtorch's stable ABI: one build serves PyTorch
// 2.11 and later. A FRAGMENT, because CUDA builds of vLLM own the namespace. Fakes are
// registered in vllm/v1/nwor/ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "transaction/ops.h"

namespace nwor {
namespace {

// What the dispatcher passes for an argument of an op. The dispatcher holds each tensor
// during the call, so pointers to its sizes and strides stay valid.
template <typename T>
struct Passed {
  using Type = T;
  static T look_at(T value) { return value; }
};

template <>
struct Passed<Tensor> {
  using Type = torch::stable::Tensor;
  static Tensor look_at(const Type& tensor) {
    int32_t device_type = 0;
    int64_t* sizes = nullptr;
    int64_t* strides = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device_type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &sizes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &strides));
    return {tensor.data_ptr(),
            device_type,
            tensor.get_device_index(),
            tensor.scalar_type(),
            tensor.dim(),
            sizes,
            strides};
  }
};

template <>
struct Passed<OptionalTensor> {
  using Type = std::optional<torch::stable::Tensor>;
  static OptionalTensor look_at(const Type& tensor) {
    return tensor.has_value() ? OptionalTensor(Passed<Tensor>::look_at(*tensor))
                              : OptionalTensor();
  }
};

template <auto kOp>
struct FromDispatcher;

template <typename... Args, void (*kOp)(Args...)>
struct FromDispatcher<kOp> {
  static void call(typename Passed<Args>::Type... args) {
    kOp(Passed<Args>::look_at(args)...);
  }
};

}  // namespace
}  // namespace nwor

// PyTorch does not see which caches an op reads and writes: their addresses are in the
// table.
STABLE_TORCH_LIBRARY_FRAGMENT(_C_cache_ops, ops) {
  ops.def(
      "log_cache_slots(Tensor table, Tensor? runs, Tensor slot_mapping, Tensor "
      "logits_indices, Tensor cu_num_logits, Tensor(a!) undo_log, Tensor(b!) "
      "log_slots, Tensor(c!) log_windows, int num_drafts, int first_shadow_slot, int "
      "num_leading_zeros=0) -> ()");
  ops.def(
      "restore_rejected_drafts(Tensor table, Tensor? runs, Tensor undo_log, Tensor "
      "log_slots, Tensor log_windows, Tensor? sampled_token_ids, int vocab_size, "
      "Tensor? num_rejected, Tensor(a!) counters, int num_drafts, Tensor(b!)? "
      "counters_to=None) -> ()");
  ops.def(
      "stage(Tensor table, Tensor? runs, Tensor(a!) block_table, Tensor(b!) "
      "slot_mapping, Tensor query_start_loc, Tensor seq_lens, Tensor "
      "cu_num_logits, Tensor? state_indices, Tensor(c!) saved, int first_entry, int "
      "num_real_entries, int span, int entry_tokens, Tensor? seat_of_state, int step, "
      "bool patches, bool rest_is_logged, int num_leading_zeros=0) -> ()");
  ops.def(
      "commit_draft_layer(Tensor table, Tensor? runs, Tensor(a!) block_table, "
      "Tensor(b!) slot_mapping, Tensor? state_indices, Tensor(c!) saved, Tensor? "
      "sampled_token_ids, int vocab_size, Tensor? num_rejected, Tensor(d!) "
      "counters, int num_reqs, int entry_tokens, Tensor? seat_of_state, bool undoes, "
      "Tensor(e!)? counters_to=None) -> ()");
  ops.def(
      "unstage(Tensor(a!) block_table, Tensor(b!) slot_mapping, Tensor? "
      "state_indices, Tensor saved, int num_reqs, int entry_tokens, Tensor? "
      "seat_of_state) -> ()");
}

#define NWOR_IMPLEMENT(name) \
  ops.impl(#name, TORCH_BOX(&nwor::FromDispatcher<&nwor::name>::call));

STABLE_TORCH_LIBRARY_IMPL(_C_cache_ops, CPU, ops){NWOR_TRANSACTION_OPS(NWOR_IMPLEMENT)}
#ifdef NWOR_CUDA
STABLE_TORCH_LIBRARY_IMPL(_C_cache_ops, CUDA, ops) {
  NWOR_TRANSACTION_OPS(NWOR_IMPLEMENT)
}
#endif
