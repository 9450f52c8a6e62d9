// SPDX-License-Identifier: Apache-2.0
//
// What the CUDA launchers and kernels share: sizes of blocks and grids, and accesses of
// a width that the addresses allow. CUDA sources only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/check.h"
#include "common/table.h"

namespace nwor {

constexpr int kWarpThreads = 32;
constexpr int kBlockThreads = 128;
constexpr unsigned kFullWarp = 0xffffffffu;

// Blocks of a one-dimensional grid.
inline unsigned grid_size(const char* op, int64_t num_blocks) {
  NWOR_CHECK(num_blocks <= kMaxInt32, op, "a grid of ", num_blocks,
             " blocks is needed; must be at most ", kMaxInt32);
  return static_cast<unsigned>(num_blocks);
}

// The widest access, 1 to 16 bytes, for addresses and strides or-ed together.
__host__ __device__ inline uint32_t widest_access(uint64_t addresses_and_strides) {
  const uint64_t bits = addresses_and_strides | 16u;
  return static_cast<uint32_t>(bits & (~bits + 1));
}

// For any head of any slot of a layer.
__device__ inline uint32_t widest_access(const LayerRow& layer) {
  return widest_access(static_cast<uint64_t>(layer.base) | layer.block_stride |
                       layer.slot_stride | layer.run_bytes |
                       (layer.num_heads > 1 ? layer.head_stride : 0));
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
