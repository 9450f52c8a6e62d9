// SPDX-License-Identifier: Apache-2.0
//
// What the CUDA launchers and kernels share: the device, launch errors, and byte
// copies of a width that the addresses allow. CUDA sources only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "check.h"

namespace nwor {

constexpr int kWarpThreads = 32;
constexpr int kBlockThreads = 128;
constexpr unsigned kFullWarp = 0xffffffffu;

// PyTorch's device guard moved the driver's context; this makes the CUDA runtime that
// is linked into this library follow.
inline void use_device(const char* op, int device) {
  int current = -1;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != device) {
    error = cudaSetDevice(device);
  }
  NWOR_CHECK(error == cudaSuccess, op, "cuda:", device,
             " cannot be used: ", cudaGetErrorString(error));
}

inline void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  NWOR_CHECK(error == cudaSuccess, op,
             "the launch failed: ", cudaGetErrorString(error));
}

// Blocks of a one-dimensional grid.
inline unsigned grid_size(const char* op, int64_t num_blocks) {
  constexpr int64_t kMaxGrid = 2147483647;
  NWOR_CHECK(num_blocks <= kMaxGrid, op, "num_drafts needs ", num_blocks,
             " blocks; must be at most ", kMaxGrid);
  return static_cast<unsigned>(num_blocks);
}

// The widest access, 1 to 16 bytes, for addresses and strides or-ed together.
__host__ __device__ inline uint32_t widest_access(uint64_t addresses_and_strides) {
  const uint64_t bits = addresses_and_strides | 16u;
  return static_cast<uint32_t>(bits & (~bits + 1));
}

// Unsigned types of 1 to 16 bytes.
template <int kBytes>
struct PieceOf;
template <>
struct PieceOf<1> {
  using type = uint8_t;
};
template <>
struct PieceOf<2> {
  using type = uint16_t;
};
template <>
struct PieceOf<4> {
  using type = uint32_t;
};
template <>
struct PieceOf<8> {
  using type = uint2;
};
template <>
struct PieceOf<16> {
  using type = uint4;
};

}  // namespace nwor
