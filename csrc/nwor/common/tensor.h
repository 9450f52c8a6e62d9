// SPDX-License-Identifier: Apache-2.0
//
// A tensor argument of an op, passed by Python (python_bindings.cpp) or by PyTorch's
// dispatcher (torch_bindings.cpp). It owns nothing.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>

namespace nwor {

// PyTorch's numbers of device types. No other device is supported.
enum DeviceType : int32_t { kCpu = 0, kCuda = 1 };

struct Tensor {
  using ScalarType = torch::headeronly::ScalarType;

  void* data;
  int32_t device_type;
  int32_t device_index;
  ScalarType dtype;
  int64_t num_dims;
  const int64_t* sizes;
  const int64_t* strides;  // in elements

  int64_t size(int64_t dim) const { return sizes[dim]; }
  int64_t stride(int64_t dim) const { return strides[dim]; }
  bool is_contiguous() const {
    bool is_empty = false;
    bool follows = true;
    int64_t expected = 1;
    for (int64_t i = num_dims - 1; i >= 0; --i) {
      is_empty = is_empty || sizes[i] == 0;
      follows = follows && (sizes[i] == 1 || strides[i] == expected);
      expected *= sizes[i];
    }
    return follows || is_empty;
  }
};

using OptionalTensor = std::optional<Tensor>;

}  // namespace nwor
