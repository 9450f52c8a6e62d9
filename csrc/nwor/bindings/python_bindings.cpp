// SPDX-License-Identifier: Apache-2.0
//
// The Python module: what a step calls, without PyTorch's dispatcher. Much code of the
// model runs between two steps, so ours is cold in the CPU's caches when it runs, and a
// call through the dispatcher costs several times what it costs in a tight loop. The
// audit's ops are builtin functions, which take all arguments of a call. LoggedLayers
// and StagedLayers are classes, whose methods take only a step's own arguments: reading
// and checking a tensor takes longer than the launch. All arguments are positional.
// Checks and messages are those of the registered ops. Tensors are read through
// DLPack's C exchange API. The functions return None, or raise RuntimeError, TypeError
// or OverflowError.
//
// The device of CUDA tensors must be the current one. The GIL is kept: a launch only
// enqueues. Where the queue is full it waits for the device, which in vLLM waits for no
// Python thread. Releasing the GIL would mean waiting for it whenever another thread
// took it meanwhile.
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <cstddef>
#include <exception>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "audit/ops.h"
#include "bindings/constants.h"
#include "common/check.h"
#include "common/dispatch.h"
#include "transaction/ops.h"

namespace nwor {
namespace {

// VERSION in vllm/v1/nwor/ops.py: raised with every change of the module's interface.
constexpr long kVersion = 11;

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

template <typename T>
T read(PyObject* argument);

// Not inlined: else a step fetches its code anew for each argument.
template <>
[[gnu::noinline]] Tensor read(PyObject* argument) {
  DlpackTensor found;
  if (exchange->look_at(argument, &found) != 0) {
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

// Calls `body` with the arguments as the types Args.
template <typename... Args, typename Body, size_t... kIndex>
void apply(PyObject* const* arguments, const Body& body,
           std::index_sequence<kIndex...>) {
  // In braces, to be read in order.
  std::tuple<Args...> values{read<Args>(arguments[kIndex])...};
  const CurrentDevice is_current;
  body(std::move(std::get<kIndex>(values))...);
}

template <typename... Args, typename Body>
void apply(const char* name, PyObject* const* arguments, Py_ssize_t number,
           const Body& body) {
  NWOR_CHECK(number == sizeof...(Args), name, "got ", number, " arguments; must be ",
             sizeof...(Args));
  apply<Args...>(arguments, body, std::index_sequence_for<Args...>());
}

template <auto kOp>
struct Builtin;

template <typename... Args, void (*kOp)(Args...)>
struct Builtin<kOp> {
  static PyObject* call(const char* name, PyObject* const* arguments,
                        Py_ssize_t number) {
    return result_of([&] { apply<Args...>(name, arguments, number, kOp); });
  }
};

#define NWOR_BUILTIN(name)                                                          \
  PyObject* call_##name(PyObject*, PyObject* const* arguments, Py_ssize_t number) { \
    return Builtin<&nwor::name>::call(#name, arguments, number);                    \
  }
NWOR_AUDIT_OPS(NWOR_BUILTIN)

// A class of Python around T, which is made of Args; it keeps them, as `made_of`.
template <typename T, typename... Args>
struct Class {
  struct Object {
    PyObject_HEAD;
    PyObject* made_of;
    T value;
  };

  static PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* named) {
    std::vector<PyObject*> all(PyTuple_Size(arguments));
    for (size_t i = 0; i < all.size(); ++i) {
      all[i] = PyTuple_GetItem(arguments, static_cast<Py_ssize_t>(i));
    }
    PyObject* made = nullptr;
    PyObject* const none = result_of([&] {
      NWOR_CHECK(named == nullptr, T::kName, "takes arguments by position only");
      apply<Args...>(T::kName, all.data(), static_cast<Py_ssize_t>(all.size()),
                     [&](auto... values) {
                       const T value(std::move(values)...);
                       made = PyType_GenericAlloc(type, 0);
                       if (made == nullptr) {
                         throw PythonError();
                       }
                       auto* const object = reinterpret_cast<Object*>(made);
                       new (&object->value) T(value);
                       object->made_of = Py_NewRef(arguments);
                     });
    });
    Py_XDECREF(none);
    return made;
  }

  static void end(PyObject* self) {
    PyTypeObject* const type = Py_TYPE(self);
    Py_DECREF(reinterpret_cast<Object*>(self)->made_of);
    PyObject_Free(self);
    Py_DECREF(type);
  }

  template <auto kMethod>
  struct Method;

  template <typename... Values, void (T::*kMethod)(Values...)>
  struct Method<kMethod> {
    static PyObject* call(PyObject* self, PyObject* const* arguments,
                          Py_ssize_t number) {
      return result_of([&] {
        apply<Values...>(T::kName, arguments, number, [&](Values... values) {
          (reinterpret_cast<Object*>(self)->value.*kMethod)(std::move(values)...);
        });
      });
    }
  };

  // False with an exception set.
  static bool add_to(PyObject* module, PyMethodDef* methods) {
    static_assert(std::is_trivially_destructible_v<T>, "end() destroys nothing");
    static PyMemberDef members[] = {
        {"made_of", T_OBJECT, offsetof(Object, made_of), READONLY, nullptr}, {}};
    PyType_Slot slots[] = {{Py_tp_members, members},
                           {Py_tp_new, reinterpret_cast<void*>(&make)},
                           {Py_tp_dealloc, reinterpret_cast<void*>(&end)},
                           {Py_tp_methods, methods},
                           {0, nullptr}};
    const std::string name = std::string("_nwor_C.") + T::kName;
    PyType_Spec spec{name.c_str(), sizeof(Object), 0, Py_TPFLAGS_DEFAULT, slots};
    PyObject* const type = PyType_FromSpec(&spec);
    return type != nullptr && PyModule_AddObject(module, T::kName, type) == 0;
  }
};

using Logged = Class<LoggedLayers, Tensor, OptionalTensor, Tensor, OptionalTensor,
                     Tensor, Tensor, Tensor, Tensor, Tensor, int64_t>;
using Staged = Class<StagedLayers, Tensor, OptionalTensor, Tensor, Tensor, Tensor,
                     int64_t, int64_t, int64_t, int64_t, OptionalTensor, bool, bool>;

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

namespace {

template <typename Function>
PyMethodDef method(const char* name, Function* function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
          METH_FASTCALL, nullptr};
}

}  // namespace

#define NWOR_METHOD(name) method(#name, &nwor::call_##name),

PyMODINIT_FUNC PyInit__nwor_C() {
  using nwor::Logged;
  using nwor::LoggedLayers;
  using nwor::Staged;
  using nwor::StagedLayers;
  constexpr PyMethodDef kEnd{nullptr, nullptr, 0, nullptr};
  static PyMethodDef functions[] = {NWOR_AUDIT_OPS(NWOR_METHOD)
#ifdef NWOR_CUDA
                                        NWOR_METHOD(load_kernels)
#endif
                                            kEnd};
  static PyMethodDef of_logged[] = {
      method("log", &Logged::Method<&LoggedLayers::log>::call),
      method("restore", &Logged::Method<&LoggedLayers::restore>::call), kEnd};
  static PyMethodDef of_staged[] = {
      method("stage", &Staged::Method<&StagedLayers::stage>::call),
      method("commit", &Staged::Method<&StagedLayers::commit>::call),
      method("unstage", &Staged::Method<&StagedLayers::unstage>::call), kEnd};
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                   "_nwor_C",
                                   nullptr,
                                   -1,
                                   functions,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr};
  nwor::exchange = nwor::exchange_of_torch();
  if (nwor::exchange == nullptr) {
    return nullptr;
  }
  PyObject* const module = PyModule_Create(&definition);
  if (module == nullptr || !Logged::add_to(module, of_logged) ||
      !Staged::add_to(module, of_staged) || !nwor::add_constants(module)) {
    return nullptr;
  }
  PyModule_AddIntConstant(module, "version", nwor::kVersion);
#ifdef NWOR_CUDA
  PyModule_AddStringConstant(module, "cuda_build", nwor::cuda_build());
#endif
  return module;
}
