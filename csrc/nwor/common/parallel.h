// SPDX-License-Identifier: Apache-2.0
//
// A parallel loop on PyTorch's own threads, through the stable C interface
// (PyTorch 2.10 and later). No second OpenMP runtime, and the number of threads
// is the one that the user gave PyTorch.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <mutex>
#include <stdexcept>

namespace nwor {

// Calls body(begin, end) for pieces of [0, count), each at least `grain` long
// except the last. If the body throws, a std::runtime_error with the text of the first
// exception is thrown once all pieces have ended: an exception must not cross PyTorch's
// C interface, nor leave a thread of PyTorch's. Only the text is kept: what copies an
// exception_ptr is in no libstdc++ before GCC 11's.
template <typename Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
  if (count <= grain) {
    if (count > 0) {
      body(int64_t{0}, count);
    }
    return;
  }
  struct Context {
    const Body& body;
    std::mutex is_failing;
    char failure[1024];
  } context{body, {}, ""};
  const auto call = [](int64_t begin, int64_t end, void* given) {
    auto& context = *static_cast<Context*>(given);
    try {
      context.body(begin, end);
    } catch (const std::exception& error) {
      const std::lock_guard<std::mutex> lock(context.is_failing);
      if (context.failure[0] == '\0') {
        std::snprintf(context.failure, sizeof(context.failure), "%s", error.what());
      }
    }
  };
  const bool is_done = torch_parallel_for(0, count, grain, call, &context) == 0;
  if (context.failure[0] != '\0') {
    throw std::runtime_error(context.failure);
  }
  if (!is_done) {
    throw std::runtime_error("nwor: PyTorch's parallel_for failed");
  }
}

}  // namespace nwor
