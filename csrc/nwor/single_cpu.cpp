// SPDX-License-Identifier: Apache-2.0
//
// The oracles: log and restore for one cache tensor and one list of slots, byte
// by byte, one thread. Deliberately naive: tests compare the fast code to it.
#include "check.h"
#include "launch.h"

namespace nwor {
namespace {

void check_slots(const char* op, const SingleArgs& args) {
  for (int64_t i = 0; i < args.num_slots; ++i) {
    NWOR_CHECK(args.slots[i] >= kPadSlot && args.slots[i] < args.cache.num_slots(), op,
               "slots[", i, "] is ", args.slots[i],
               "; must be -1 (padding) or between 0 and ", args.cache.num_slots() - 1);
  }
}

// Calls copy(cache byte, log byte) for each byte of entry i.
template <typename Copy>
void for_each_byte(const SingleArgs& args, int64_t i, const Copy& copy) {
  uint8_t* log = args.log + i * args.log_row_stride;
  const HeadRows& rows = args.cache.rows;
  for (int64_t head = 0; head < rows.num_heads; ++head) {
    for (int64_t byte = 0; byte < rows.head_size * args.element_bytes; ++byte) {
      copy(args.cache.slot(args.slots[i]) + head * rows.head_stride + byte, log++);
    }
  }
}

}  // namespace

void log_cache_slots_single_cpu(const SingleArgs& args) {
  check_slots("log_cache_slots.single", args);
  for (int64_t i = 0; i < args.num_slots; ++i) {
    if (args.slots[i] >= 0) {
      for_each_byte(args, i, [](uint8_t* cache, uint8_t* log) { *log = *cache; });
    }
  }
}

void restore_rejected_drafts_single_cpu(const SingleArgs& args) {
  check_slots("restore_rejected_drafts.single", args);
  for (int64_t i = 0; i < args.num_slots; ++i) {
    if (args.slots[i] >= 0 && args.rejected_mask[i]) {
      for_each_byte(args, i, [](uint8_t* cache, uint8_t* log) { *cache = *log; });
    }
  }
}

}  // namespace nwor
