// SPDX-License-Identifier: Apache-2.0
#include "builtins.h"

#include <algorithm>
#include <exception>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings.h"
#include "check.h"
#include "dispatch.h"

namespace nwor {
namespace {

using ScalarType = Tensor::ScalarType;

NworInterpreter python;

// An exception of Python is set.
struct PythonError {};

ScalarType dtype_of(const DlpackTensor& tensor) {
  enum Code { kInt, kUnsigned, kFloat, kBfloat = 4, kBool = 6 };
  const auto is = [&](int code, int bits) {
    return tensor.dtype_code == code && tensor.dtype_bits == bits &&
           tensor.dtype_lanes == 1;
  };
  return is(kInt, 32)       ? ScalarType::Int
         : is(kInt, 64)     ? ScalarType::Long
         : is(kUnsigned, 8) ? ScalarType::Byte
         : is(kFloat, 32)   ? ScalarType::Float
         : is(kFloat, 64)   ? ScalarType::Double
         : is(kFloat, 16)   ? ScalarType::Half
         : is(kBfloat, 16)  ? ScalarType::BFloat16
         : is(kInt, 8)      ? ScalarType::Char
         : is(kInt, 16)     ? ScalarType::Short
         : is(kBool, 8)     ? ScalarType::Bool
                            : ScalarType::Undefined;
}

int32_t device_type_of(int32_t dlpack_type) {
  constexpr int32_t kDlpackCpu = 1, kDlpackCuda = 2, kDlpackPinned = 3, kForeign = 1000;
  return dlpack_type == kDlpackCpu || dlpack_type == kDlpackPinned ? kCpu
         : dlpack_type == kDlpackCuda                              ? kCuda
                                                                   : kForeign;
}

Tensor look_at(void* object) {
  DlpackTensor found;
  if (python.dlpack->look_at(object, &found) != 0) {
    throw PythonError();
  }
  return {static_cast<char*>(found.data) + found.byte_offset,
          device_type_of(found.device_type),
          found.device_id,
          dtype_of(found),
          found.num_dims,
          found.sizes,
          found.strides};
}

// Objects that need not be looked at, and what they are.
class KnownTensors {
 public:
  const Tensor* find(void* object) const {
    const auto place = std::find(objects_.begin(), objects_.end(), object);
    return place == objects_.end() ? nullptr : &tensors_[place - objects_.begin()];
  }
  void add(void* object, const Tensor& tensor) {
    tensors_.push_back(tensor);
    objects_.push_back(object);
  }
  void remove(void* object) {
    const auto place = std::find(objects_.begin(), objects_.end(), object);
    if (place != objects_.end()) {
      tensors_.erase(tensors_.begin() + (place - objects_.begin()));
      objects_.erase(place);
    }
  }
  // Gives back the references to all objects, which are ours. Whoever hears of an
  // object's end may come back here.
  void release() {
    while (!objects_.empty()) {
      void* const object = objects_.back();
      objects_.pop_back();
      tensors_.pop_back();
      python.remove_reference(object);
    }
  }

 private:
  std::vector<void*> objects_;
  std::vector<Tensor> tensors_;
};

KnownTensors remembered;
// Those of a step, from `stage` until its tables are put back, with a reference to
// each.
KnownTensors staged;
bool is_staging = false;

template <typename T>
struct Argument;

template <>
struct Argument<Tensor> {
  // Not inlined: else a step fetches its code anew for each argument.
  [[gnu::noinline]] static Tensor read(void* object) {
    if (const Tensor* const tensor = remembered.find(object)) {
      return *tensor;
    }
    if (const Tensor* const tensor = staged.find(object)) {
      return *tensor;
    }
    const Tensor tensor = look_at(object);
    if (is_staging) {
      python.add_reference(object);
      staged.add(object, tensor);
    }
    return tensor;
  }
};

template <>
struct Argument<void*> {
  static void* read(void* object) { return object; }
};

template <>
struct Argument<OptionalTensor> {
  static OptionalTensor read(void* object) {
    return object == python.none ? OptionalTensor()
                                 : OptionalTensor(Argument<Tensor>::read(object));
  }
};

template <>
struct Argument<int64_t> {
  static int64_t read(void* object) {
    const int64_t value = python.as_long_long(object);
    if (value == -1 && python.error_occurred() != nullptr) {
      throw PythonError();
    }
    return value;
  }
};

template <>
struct Argument<bool> {
  static bool read(void* object) { return Argument<int64_t>::read(object) != 0; }
};

template <auto kOp>
struct Builtin;

template <typename... Args, void (*kOp)(Args...)>
struct Builtin<kOp> {
  static inline const char* name;

  static void* call(void*, void* const* arguments, int64_t num_arguments) {
    if constexpr (kStages) {
      staged.release();
    }
    is_staging = kStages;
    void* const result = run(arguments, num_arguments);
    is_staging = false;
    if constexpr (kEnds) {
      staged.release();
    }
    return result;
  }

 private:
  static constexpr bool kStages = std::is_same_v<Builtin, Builtin<&stage>>;
  static constexpr bool kEnds = std::is_same_v<Builtin, Builtin<&commit_draft_layer>> ||
                                std::is_same_v<Builtin, Builtin<&unstage>>;

  static void* run(void* const* arguments, int64_t num_arguments) {
    try {
      NWOR_CHECK(num_arguments == sizeof...(Args), name, "got ", num_arguments,
                 " arguments; must be ", sizeof...(Args));
      apply(arguments, std::index_sequence_for<Args...>());
    } catch (const PythonError&) {
      return nullptr;
    } catch (const std::exception& error) {
      python.set_error(python.runtime_error, error.what());
      return nullptr;
    }
    python.add_reference(python.none);
    return python.none;
  }

  template <size_t... kIndex>
  static void apply(void* const* arguments, std::index_sequence<kIndex...>) {
    // In braces, to be read in order.
    std::tuple<Args...> values{Argument<Args>::read(arguments[kIndex])...};
    const CurrentDevice is_current;
    kOp(std::move(std::get<kIndex>(values))...);
  }
};

template <auto kOp>
NworBuiltin builtin(const char* name) {
  Builtin<kOp>::name = name;
  return {name, &Builtin<kOp>::call};
}

void remember(void* object) {
  remembered.add(object, look_at(object));
}
void forget(void* object) {
  remembered.remove(object);
}

}  // namespace
}  // namespace nwor

const char* nwor_builtins(const NworInterpreter* interpreter,
                          const NworBuiltin** builtins) {
#define NWOR_BUILTIN(op, arguments) nwor::builtin<&nwor::op>(#op),
  static const NworBuiltin all[] = {NWOR_OPS(NWOR_BUILTIN) NWOR_BUILTIN(remember, )
                                        NWOR_BUILTIN(forget, ){nullptr, nullptr}};
#undef NWOR_BUILTIN
  if (interpreter->version != kNworBuiltinsVersion) {
    return "it is of another version of vllm-nwor";
  }
  const DlpackExchange* const dlpack = interpreter->dlpack;
  if (dlpack->major_version != 1 || dlpack->look_at == nullptr) {
    return "this PyTorch's tensors have no DLPack exchange API of version 1";
  }
  nwor::python = *interpreter;
  *builtins = all;
  return nullptr;
}

const char* nwor_load_kernels([[maybe_unused]] int64_t device) {
#ifdef NWOR_CUDA
  try {
    nwor::load_cow_kernels("start-up", static_cast<int>(device));
    nwor::load_shadow_kernels("start-up", static_cast<int>(device));
    return nullptr;
  } catch (const std::exception& error) {
    thread_local std::string text;
    text = error.what();
    return text.c_str();
  }
#else
  return "it has no CUDA code";
#endif
}
