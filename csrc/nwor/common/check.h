// SPDX-License-Identifier: Apache-2.0
//
// How this library refuses a value: it throws an exception. The message names the op,
// the argument, the value and the allowed values. PyTorch passes it to Python as a
// RuntimeError.
//
// PyTorch's own STD_TORCH_CHECK is not used because it puts the path of the
// source file, as it was on the build machine, into the message.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>

namespace nwor {

constexpr int64_t kMaxInt32 = 2147483647;

template <typename... Parts>
[[noreturn]] inline void refuse(const char* op, const Parts&... parts) {
  std::ostringstream text;
  text << op << ": ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

}  // namespace nwor

// The parts are only evaluated when the condition is false.
#define NWOR_CHECK(condition, op, ...) \
  do {                                 \
    if (!(condition)) {                \
      ::nwor::refuse(op, __VA_ARGS__); \
    }                                  \
  } while (0)
