// SPDX-License-Identifier: Apache-2.0
//
// The audit on the CPU: who calls the passes of audit_passes.h. Where bytes are read,
// slots are shared out among PyTorch's threads.
#include <algorithm>
#include <vector>

#include "audit_passes.h"
#include "check.h"
#include "copy_cpu.h"
#include "parallel.h"
#include "table_cpu.h"

namespace nwor {
namespace {

// A team of one.
class Solo {
 public:
  // slot_bytes: where checksums are asked for, of a slot in a layer at most.
  explicit Solo(int64_t slot_bytes = 0) : words_((slot_bytes + 7) / 8) {}

  int64_t index() const { return 0; }
  int64_t size() const { return 1; }
  int64_t lane() const { return 0; }
  int64_t num_lanes() const { return 1; }
  bool is_first_warp() const { return true; }
  bool is_last_warp() const { return true; }
  void sync() const {}
  TeamSum sum(int64_t value) const { return {value, value}; }
  int64_t warp_sum(int64_t value) const { return value; }
  int64_t of_first(int64_t value) const { return value; }
  int64_t of_last_lane(int64_t value) const { return value; }
  int64_t count_lanes(bool is) const { return is; }
  int64_t first_lane(bool is) const { return is ? 0 : -1; }
  template <typename Value>
  Value load(const Value* from) const {
    return *from;
  }
  int64_t num_accepted(const Acceptance& acceptance, int64_t r, int64_t num_drafts) {
    return ::nwor::num_accepted(acceptance, r, num_drafts);
  }

  const int32_t* checksums(const AuditPart& part, int64_t slot) {
    sums_.resize(part.table.num_layers);
    for (int64_t i = 0; i < part.table.num_layers; ++i) {
      sums_[i] = layer_checksum(part.table.rows[i], part.runs, slot);
    }
    return sums_.data();
  }

 private:
  int32_t layer_checksum(const LayerRow& layer, const RunList& runs, int64_t slot) {
    const auto* base = reinterpret_cast<const uint8_t*>(layer.base);
    auto* const begin = reinterpret_cast<uint8_t*>(words_.data());
    uint8_t* to = begin;
    words_.back() = 0;
    if (runs.data != nullptr) {
      const uint8_t* block = base + layer.block_offset(slot);
      const int32_t* run = runs.of(slot % runs.block_size);
      for (int64_t j = 0; j < runs.num_runs; ++j) {
        copy_bytes(to, block + run[2 * j], run[2 * j + 1]);
        to += run[2 * j + 1];
      }
    } else {
      const uint8_t* from = base + layer.slot_offset(slot);
      for (int64_t head = 0; head < layer.num_heads; ++head) {
        copy_bytes(to, from + head * layer.head_stride, layer.run_bytes);
        to += layer.run_bytes;
      }
    }
    const int64_t num_words = (to - begin + 7) / 8;
    uint32_t sum = 0;
    for (int64_t word = 0; word < num_words; ++word) {
      sum += checksum_of(words_[word], word);
    }
    return static_cast<int32_t>(sum);
  }

  std::vector<int32_t> sums_;
  std::vector<uint64_t> words_;  // one layer's bytes of a slot
};

// Bytes of a slot in a part's largest layer.
int64_t slot_bytes(const AuditPart& part) {
  if (part.runs.data != nullptr) {
    return check_runs("audit", part.table, part.runs, 0);
  }
  int64_t longest = 0;
  for (int64_t i = 0; i < part.table.num_layers; ++i) {
    const LayerRow& layer = part.table.rows[i];
    longest = std::max(longest, layer.num_heads * layer.run_bytes);
  }
  return longest;
}

// body(team, i) for each of `count` slots, whose checksums it takes.
template <typename Body>
void for_slots(const AuditPart& part, int64_t count, const Body& body) {
  const int64_t cost = slot_cost(part.table, part.runs) * part.table.num_layers;
  const int64_t num_bytes = slot_bytes(part);
  parallel_for(count, std::max<int64_t>(1, kCostPerThread / cost),
               [&](int64_t begin, int64_t end) {
                 Solo team(num_bytes);
                 for (int64_t i = begin; i < end; ++i) {
                   body(team, i);
                 }
               });
}

void check_batch(const char* op, const AuditStep& args) {
  const AuditBatch& batch = args.batch;
  NWOR_CHECK(batch.query_start_loc[0] == 0, op, "query_start_loc[0] is ",
             batch.query_start_loc[0], "; must be 0");
  for (int64_t r = 0; r < batch.num_reqs; ++r) {
    const int64_t seat = batch.row_seats.at(r);
    NWOR_CHECK(seat >= 0 && seat < args.group.num_seats, op, "row_seats[", r, "] is ",
               seat, "; must be between 0 and ", args.group.num_seats - 1);
    const int64_t begin = batch.query_start_loc[r];
    const int64_t end = batch.query_start_loc[r + 1];
    NWOR_CHECK(begin <= end && end <= args.num_tokens, op, "query_start_loc[", r + 1,
               "] is ", end, "; must be between ", begin, " and ", args.num_tokens);
  }
}

// pass(args, r) for each request of a batch.
template <typename Args>
void for_requests(const Args& args, void (*pass)(Solo&, const Args&, int64_t)) {
  Solo team;
  for (int64_t r = 0; r < args.batch.num_reqs; ++r) {
    pass(team, args, r);
  }
}

void scan(const AuditResolveArgs& args, const ScanRange& range) {
  for (int64_t i = 0; range.num_blocks > 0 && i < args.group.num_parts; ++i) {
    const AuditPart& part = args.parts[i];
    std::vector<int64_t> ends(std::max<int64_t>(1, args.batch.num_reqs));
    Solo solo;
    const Places places = places_of(solo, args, range, ends.data());
    move_cursor(args.group, range, places);
    for_slots(part, places.count * args.group.block_size, [&](Solo& team, int64_t n) {
      scan_slot(team, args, part, range, places, n);
    });
  }
}

}  // namespace

void audit_seat_cpu(const AuditSeatArgs& args) {
  Solo team;
  seat_request(team, args);
}

void audit_plan_cpu(const AuditPlanArgs& args) {
  check_batch("audit_plan", args);
  for_requests(args, plan_request<Solo>);
}

void audit_resolve_cpu(const AuditResolveArgs& args) {
  check_batch("audit_resolve", args);
  Solo solo;
  for_requests(args, keep_request<Solo>);
  for_requests(args, check_request<Solo>);
  for (int64_t i = 0; i < args.group.num_parts; ++i) {
    const AuditPart& part = args.parts[i];
    for_slots(part, args.num_tokens,
              [&](Solo& team, int64_t row) { record_row(team, args, part, row); });
    judge_suspects(solo, args, part);
  }
  for (int64_t i = 0; i < args.num_hits; ++i) {
    adopt(solo, args, args.hits[i]);
    scan(args, {args.hits[i].row, args.num_hit_blocks});
  }
  scan(args, {-1, args.num_blocks});
  publish(solo, args);
}

void audit_blocks_cpu(const AuditBlocksArgs& args) {
  Solo team;
  for (int64_t i = 0; i < args.count; ++i) {
    block_event(team, args, args.blocks[i], args.values[i]);
  }
}

void audit_snapshot_cpu(const AuditSnapshotArgs& args) {
  const AuditGroup& group = args.group;
  for (int64_t i = 0; i < group.num_parts; ++i) {
    const AuditPart& part = args.parts[i];
    check_layers("audit_snapshot", part.table, part.runs);
    for_slots(part, group.num_slots(), [&](Solo& team, int64_t slot) {
      snapshot_slot(team, group, part, args.again, slot);
    });
  }
}

}  // namespace nwor
