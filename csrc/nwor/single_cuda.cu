// SPDX-License-Identifier: Apache-2.0
//
// The oracles on CUDA: as naive as on the CPU, a block for each slot and a thread for
// each byte. A slot out of range is left alone.
#include "cuda_support.h"
#include "launch.h"

namespace nwor {
namespace {

template <bool kToLog>
__global__ void single_kernel(const __grid_constant__ SingleArgs args) {
  const int64_t slot = args.slots[blockIdx.x];
  if (slot < 0 || slot >= args.cache.num_slots() ||
      (!kToLog && !args.rejected_mask[blockIdx.x])) {
    return;
  }
  const HeadRows& rows = args.cache.rows;
  const int64_t head_bytes = rows.head_size * args.element_bytes;
  for (int64_t i = threadIdx.x; i < rows.num_heads * head_bytes; i += blockDim.x) {
    uint8_t* cache =
        args.cache.slot(slot) + i / head_bytes * rows.head_stride + i % head_bytes;
    uint8_t* log = args.log + blockIdx.x * args.log_row_stride + i;
    *(kToLog ? log : cache) = *(kToLog ? cache : log);
  }
}

template <bool kToLog>
void launch(const char* op, const SingleArgs& args, int device, void* stream) {
  if (args.num_slots == 0) {
    return;
  }
  use_device(op, device);
  single_kernel<kToLog><<<grid_size(op, args.num_slots), kBlockThreads, 0,
                          static_cast<cudaStream_t>(stream)>>>(args);
  check_launch(op);
}

}  // namespace

void log_cache_slots_single_cuda(const SingleArgs& args, int device, void* stream) {
  launch<true>("log_cache_slots.single", args, device, stream);
}

void restore_rejected_drafts_single_cuda(const SingleArgs& args, int device,
                                         void* stream) {
  launch<false>("restore_rejected_drafts.single", args, device, stream);
}

}  // namespace nwor
