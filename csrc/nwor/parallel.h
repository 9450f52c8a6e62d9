// SPDX-License-Identifier: Apache-2.0
//
// A parallel loop on PyTorch's own threads, through the stable C interface
// (PyTorch 2.10 and later). No second OpenMP runtime, and the number of threads
// is the one that the user gave PyTorch.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <cstdint>
#include <stdexcept>

namespace nwor {

// Calls body(begin, end) for pieces of [0, count), each at least `grain` long
// except the last. The body must not throw.
template <typename Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
  if (count <= grain) {
    if (count > 0) {
      body(int64_t{0}, count);
    }
    return;
  }
  const auto call = [](int64_t begin, int64_t end, void* context) {
    (*static_cast<const Body*>(context))(begin, end);
  };
  void* context = const_cast<void*>(static_cast<const void*>(&body));
  if (torch_parallel_for(0, count, grain, call, context) != 0) {
    throw std::runtime_error("nwor: PyTorch's parallel_for failed");
  }
}

}  // namespace nwor
