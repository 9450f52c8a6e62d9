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

class Tensor {
 public:
  using ScalarType = torch::headeronly::ScalarType;

  Tensor(void* data, int32_t device_type, int32_t device_index, ScalarType dtype,
         int64_t num_dims, const int64_t* sizes, const int64_t* strides)
      : data_(data),
        device_type_(device_type),
        device_index_(device_index),
        dtype_(dtype),
        num_dims_(num_dims),
        sizes_(sizes),
        strides_(strides) {}

  void* data_ptr() const { return data_; }
  int32_t device_type() const { return device_type_; }
  int32_t device_index() const { return device_index_; }
  ScalarType scalar_type() const { return dtype_; }
  int64_t dim() const { return num_dims_; }
  int64_t size(int64_t dim) const { return sizes_[dim]; }
  int64_t stride(int64_t dim) const { return strides_[dim]; }  // in elements

  bool is_contiguous() const {
    bool is_empty = false;
    bool follows = true;
    int64_t expected = 1;
    for (int64_t i = num_dims_ - 1; i >= 0; --i) {
      is_empty = is_empty || sizes_[i] == 0;
      follows = follows && (sizes_[i] == 1 || strides_[i] == expected);
      expected *= sizes_[i];
    }
    return follows || is_empty;
  }

 private:
  void* data_;
  int32_t device_type_;
  int32_t device_index_;
  ScalarType dtype_;
  int64_t num_dims_;
  const int64_t* sizes_;
  const int64_t* strides_;
};

using OptionalTensor = std::optional<Tensor>;

}  // namespace nwor
