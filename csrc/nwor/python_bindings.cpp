// SPDX-License-Identifier: Apache-2.0
//
// The Python module: the ops as builtin functions, past PyTorch's dispatcher. Between
// two steps of a model a lot of code runs, and what a step of ours runs is in no cache
// of the processor when its turn comes: a call through the dispatcher costs several
// times what it costs in a tight loop. A builtin takes all of the op's arguments, by
// position, with the same checks and texts, and reads tensors through DLPack's C
// exchange API. It returns None, or raises RuntimeError, TypeError or OverflowError.
//
// The device of CUDA tensors must be the current one. The interpreter's lock is kept: a
// launch enqueues, or where the queue is full waits for the device, which in vLLM waits
// for no thread of Python. To give the lock up is to wait for it where another thread
// takes it in between.
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <exception>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "check.h"
#include "dispatch.h"
#include "ops.h"

namespace nwor {
namespace {

// VERSION in vllm/v1/nwor/ops.py: raised with every change of what the module offers.
constexpr long kVersion = 3;

// Of DLPack 1.x. PyTorch's copy of its header is not for users of the stable ABI.
struct DlpackTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t num_dims;
  uint8_t dtype_code;
  uint8_t dtype_bits;
  uint16_t dtype_lanes;
  const int64_t* sizes;
  const int64_t* strides;
  uint64_t byte_offset;
};
struct DlpackExchange {
  uint32_t major_version;
  uint32_t minor_version;
  const void* previous;
  void* allocate;
  void* take_object;
  void* make_object;
  int (*look_at)(void* object, DlpackTensor* tensor);  // -1 with an exception set
  void* current_stream;
};

const DlpackExchange* exchange;

// An exception of Python is set.
struct PythonError {};

using ScalarType = Tensor::ScalarType;

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

Tensor look_at(PyObject* object) {
  DlpackTensor found;
  if (exchange->look_at(object, &found) != 0) {
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
  const Tensor* find(PyObject* object) const {
    const auto place = std::find(objects_.begin(), objects_.end(), object);
    return place == objects_.end() ? nullptr : &tensors_[place - objects_.begin()];
  }
  void add(PyObject* object, const Tensor& tensor) {
    tensors_.push_back(tensor);
    objects_.push_back(object);
  }
  void remove(PyObject* object) {
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
      PyObject* const object = objects_.back();
      objects_.pop_back();
      tensors_.pop_back();
      Py_DECREF(object);
    }
  }

 private:
  std::vector<PyObject*> objects_;
  std::vector<Tensor> tensors_;
};

KnownTensors remembered;
// Those of a step, from `stage` until its tables are put back, with a reference to
// each.
KnownTensors staged;
bool is_staging = false;

template <typename T>
T read(PyObject* argument);

// Not inlined: else a step fetches its code anew for each argument.
template <>
[[gnu::noinline]] Tensor read(PyObject* argument) {
  if (const Tensor* const tensor = remembered.find(argument)) {
    return *tensor;
  }
  if (const Tensor* const tensor = staged.find(argument)) {
    return *tensor;
  }
  const Tensor tensor = look_at(argument);
  if (is_staging) {
    Py_INCREF(argument);
    staged.add(argument, tensor);
  }
  return tensor;
}

template <>
OptionalTensor read(PyObject* argument) {
  return argument == Py_None ? OptionalTensor()
                             : OptionalTensor(read<Tensor>(argument));
}

template <>
int64_t read(PyObject* argument) {
  const int64_t value = PyLong_AsLongLong(argument);
  if (value == -1 && PyErr_Occurred() != nullptr) {
    throw PythonError();
  }
  return value;
}

template <>
bool read(PyObject* argument) {
  return read<int64_t>(argument) != 0;
}

// The result of a builtin: None, or nullptr where `body` threw.
template <typename Body>
PyObject* result_of(const Body& body) {
  try {
    body();
  } catch (const PythonError&) {
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  // Not Py_RETURN_NONE, which with the headers of some Pythons since 3.12 takes no
  // reference, as is right for none before.
  return Py_NewRef(Py_None);
}

template <auto kOp>
struct Builtin;

template <typename... Args, void (*kOp)(Args...)>
struct Builtin<kOp> {
  static PyObject* call(const char* name, PyObject* const* arguments,
                        Py_ssize_t num_arguments) {
    if constexpr (kStages) {
      staged.release();
    }
    is_staging = kStages;
    PyObject* const result = result_of([&] {
      NWOR_CHECK(num_arguments == sizeof...(Args), name, "got ", num_arguments,
                 " arguments; must be ", sizeof...(Args));
      apply(arguments, std::index_sequence_for<Args...>());
    });
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

  template <size_t... kIndex>
  static void apply(PyObject* const* arguments, std::index_sequence<kIndex...>) {
    // In braces, to be read in order.
    std::tuple<Args...> values{read<Args>(arguments[kIndex])...};
    const CurrentDevice is_current;
    kOp(std::move(std::get<kIndex>(values))...);
  }
};

#define NWOR_BUILTIN(name)                                                          \
  PyObject* call_##name(PyObject*, PyObject* const* arguments, Py_ssize_t number) { \
    return Builtin<&nwor::name>::call(#name, arguments, number);                    \
  }
NWOR_OPS(NWOR_BUILTIN)

// remember(*tensors): the ops take these objects for what they are now, without looking
// at them again, until forget(*tensors), as often. Between the two they must live, and
// their shapes, their strides and their memory must stay. From `stage` to the first
// commit_draft_layer or unstage, or the next stage, the same holds of what stage was
// called with, which lives that long.
PyObject* call_remember(PyObject*, PyObject* const* tensors, Py_ssize_t number) {
  return result_of([&] {
    for (Py_ssize_t i = 0; i < number; ++i) {
      remembered.add(tensors[i], look_at(tensors[i]));
    }
  });
}

PyObject* call_forget(PyObject*, PyObject* const* tensors, Py_ssize_t number) {
  return result_of([&] {
    for (Py_ssize_t i = 0; i < number; ++i) {
      remembered.remove(tensors[i]);
    }
  });
}

#ifdef NWOR_CUDA
// Finds the driver's launch function and loads the kernels of log, restore, stage and
// commit, which a step should not wait for.
void load_kernels(int64_t device) {
  load_cow_kernels("start-up", static_cast<int>(device));
  load_shadow_kernels("start-up", static_cast<int>(device));
}
NWOR_BUILTIN(load_kernels)
#endif

// torch.Tensor's; nullptr, with an exception set, where there is none that is known
// here.
const DlpackExchange* exchange_of_torch() {
  PyObject* const torch = PyImport_ImportModule("torch");
  PyObject* const type = torch ? PyObject_GetAttrString(torch, "Tensor") : nullptr;
  PyObject* const capsule =
      type ? PyObject_GetAttrString(type, "__dlpack_c_exchange_api__") : nullptr;
  const auto* const found = static_cast<const DlpackExchange*>(
      capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : nullptr);
  Py_XDECREF(capsule);
  Py_XDECREF(type);
  Py_XDECREF(torch);
  if (found != nullptr && found->major_version == 1 && found->look_at != nullptr) {
    return found;
  }
  PyErr_SetString(PyExc_ImportError,
                  "this PyTorch's tensors have no DLPack exchange API of version 1, "
                  "which 2.11 has");
  return nullptr;
}

}  // namespace
}  // namespace nwor

#define NWOR_METHOD(name)                                                           \
  {#name,                                                                           \
   reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&nwor::call_##name)), \
   METH_FASTCALL, nullptr},

PyMODINIT_FUNC PyInit__nwor_C() {
  static PyMethodDef methods[] = {NWOR_OPS(NWOR_METHOD) NWOR_METHOD(remember)
                                      NWOR_METHOD(forget)
#ifdef NWOR_CUDA
                                          NWOR_METHOD(load_kernels)
#endif
                                              {nullptr, nullptr, 0, nullptr}};
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                   "_nwor_C",
                                   nullptr,
                                   -1,
                                   methods,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr};
  nwor::exchange = nwor::exchange_of_torch();
  if (nwor::exchange == nullptr) {
    return nullptr;
  }
  PyObject* const module = PyModule_Create(&definition);
  if (module == nullptr) {
    return nullptr;
  }
  PyModule_AddIntConstant(module, "version", nwor::kVersion);
#ifdef NWOR_CUDA
  PyModule_AddStringConstant(module, "cuda_build", nwor::cuda_build());
#endif
  return module;
}
