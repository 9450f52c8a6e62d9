// SPDX-License-Identifier: Apache-2.0
#include "builtins.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <string>
#include <tuple>
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

// Tensors that `remember` was told of, and what they are, in the same order.
std::vector<void*> known_objects;
std::vector<Tensor> known_tensors;

size_t place_of(void* object) {
  const auto found = std::find(known_objects.begin(), known_objects.end(), object);
  return static_cast<size_t>(found - known_objects.begin());
}

template <typename T>
struct Argument;

template <>
struct Argument<Tensor> {
  static Tensor read(void* object) {
    const size_t place = place_of(object);
    return place < known_tensors.size() ? known_tensors[place] : look_at(object);
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

 private:
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
  known_tensors.push_back(look_at(object));
  known_objects.push_back(object);
}

void forget(void* object) {
  const size_t place = place_of(object);
  if (place < known_objects.size()) {
    const auto offset = static_cast<std::ptrdiff_t>(place);
    known_objects.erase(known_objects.begin() + offset);
    known_tensors.erase(known_tensors.begin() + offset);
  }
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
