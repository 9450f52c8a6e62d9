// SPDX-License-Identifier: Apache-2.0
//
// Registration, by libtorch's stable ABI: one build serves PyTorch 2.11 and later. A
// FRAGMENT, because CUDA builds of vLLM own the namespace. Fakes are registered in
// vllm/v1/nwor/ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "ops.h"

namespace nwor {
namespace {

// What the dispatcher passes for an argument of an op. It holds a tensor during the
// call, so that sizes and strides may be looked at where they are.
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

#define NWOR_DEFINE(name, arguments) ops.def(#name "(" arguments ") -> ()");
#define NWOR_IMPLEMENT(name, arguments) \
  ops.impl(#name, TORCH_BOX(&nwor::FromDispatcher<&nwor::name>::call));

STABLE_TORCH_LIBRARY_FRAGMENT(_C_cache_ops, ops){NWOR_OPS(NWOR_DEFINE)}

STABLE_TORCH_LIBRARY_IMPL(_C_cache_ops, CPU, ops){NWOR_OPS(NWOR_IMPLEMENT)}
#ifdef NWOR_CUDA
STABLE_TORCH_LIBRARY_IMPL(_C_cache_ops, CUDA, ops) {
  NWOR_OPS(NWOR_IMPLEMENT)
}
#endif
