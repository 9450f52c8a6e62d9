// SPDX-License-Identifier: Apache-2.0
//
// The ops as builtin functions of Python, past PyTorch's dispatcher. Between two steps
// of a model a lot of code runs, and what a step of ours runs is in no cache of the
// processor when its turn comes: a call through the dispatcher costs several times what
// it costs in a tight loop, and so does one through ctypes. A builtin takes the op's
// arguments by position, with the same checks and texts, and reads tensors through
// DLPack's C exchange API, which PyTorch has since 2.10.
//
// They have the signature of METH_FASTCALL, of the stable ABI. This library has no
// Python symbols: what it needs of the interpreter comes as addresses.
// vllm/v1/nwor/builtin_ops.py is the other side.
#pragma once

#include <cstdint>

#define NWOR_EXPORT extern "C" __attribute__((visibility("default")))

// Of DLPack 1.x.
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

// Raised with every change of what this file exports.
constexpr int64_t kNworBuiltinsVersion = 2;

struct NworInterpreter {
  int64_t version;                                  // kNworBuiltinsVersion
  long long (*as_long_long)(void* object);          // PyLong_AsLongLong
  void* (*error_occurred)();                        // PyErr_Occurred
  void (*set_error)(void* type, const char* text);  // PyErr_SetString
  void (*add_reference)(void* object);              // Py_IncRef
  void (*remove_reference)(void* object);           // Py_DecRef
  void* runtime_error;                              // PyExc_RuntimeError
  void* none;                                       // Py_None
  const DlpackExchange* dlpack;                     // torch.Tensor's
};

// An op as (self, arguments, number of arguments) -> None. Raises RuntimeError,
// TypeError or OverflowError. The device of CUDA tensors must be the current one. The
// interpreter's lock is kept: a launch enqueues, or where the queue is full waits for
// the device, which in vLLM waits for no thread of Python. To give the lock up is to
// wait for it where another thread takes it in between.
struct NworBuiltin {
  const char* name;
  void* (*function)(void* self, void* const* arguments, int64_t num_arguments);
};

// Returns nullptr and all ops, the last one without a name; or why they cannot be used.
// Behind the ops, in the same form: `remember(tensor)` has the ops take this object for
// what it is now, without looking at it again, until `forget(tensor)`. Between the two
// the object must live, and its shape, its strides and its memory must stay. From
// `stage` to the first commit_draft_layer or unstage, or the next stage, the same holds
// of what stage was called with, which lives that long.
NWOR_EXPORT const char* nwor_builtins(const NworInterpreter* interpreter,
                                      const NworBuiltin** builtins);

// Finds the driver's launch function and loads the kernels of log, restore, stage and
// commit, which a step should not wait for. Returns nullptr, or why they cannot run on
// this device, a text that stays valid until the thread's next call.
NWOR_EXPORT const char* nwor_load_kernels(int64_t device);
