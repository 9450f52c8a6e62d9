// SPDX-License-Identifier: Apache-2.0
//
// The audit on the CPU: who calls the passes of audit_passes.h.
#include <algorithm>
#include <vector>

#include "audit_passes.h"
#include "check.h"
#include "copy_cpu.h"
#include "parallel.h"
#include "table_cpu.h"

namespace nwor {
namespace {

// One of `count` teams of a pass.
class Solo {
 public:
  Solo(int64_t number, int64_t count) : number_(number), count_(count) {}

  // Neighbouring slots may lie in one cache line.
  Share share(int64_t count) const {
    return {count * number_ / count_, count * (number_ + 1) / count_, 1};
  }
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
  int64_t* room(int64_t count) {
    room_.resize(count);
    return room_.data();
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
    if (runs.data == nullptr) {
      words_.resize((layer.num_heads * layer.run_bytes + 7) / 8);
    } else if (words_.empty()) {
      int64_t num_bytes = 0;  // of every slot of the part
      for (int64_t j = 0; j < runs.num_runs; ++j) {
        num_bytes += runs.data[2 * j + 1];
      }
      words_.resize((num_bytes + 7) / 8);
    }
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

  int64_t number_;
  int64_t count_;
  std::vector<int64_t> room_;
  std::vector<int32_t> sums_;
  std::vector<uint64_t> words_;  // one layer's bytes of a slot
};

struct Cpu {
  const char* op;

  template <typename Pass>
  void run(const Pass& pass, int64_t num_teams) const {
    Solo team(0, 1);
    if (num_teams > 0) {
      pass(team);
    }
  }

  // Slots are shared out among PyTorch's threads.
  template <typename Pass>
  void run_slots(const Pass& pass, int64_t num_slots) const {
    const AuditPart& part = pass.part;
    const int64_t cost = slot_cost(part.table, part.runs) * part.table.num_layers;
    const int64_t num_teams = std::max<int64_t>(1, num_slots * cost / kCostPerThread);
    parallel_for(num_teams, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        Solo team(i, num_teams);
        pass(team);
      }
    });
  }
  void run_scan(const ScanSlots& pass) const {
    Solo team(0, 1);
    run_slots(pass, pass.places(team).count * pass.group.block_size);
  }

  void check(const AuditPart& part) const {
    check_layers(op, part.table, part.runs);
    if (part.runs.data != nullptr) {
      check_runs(op, part.table, part.runs, 0);
    }
  }
  void check(const AuditStep& args) const {
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
};

}  // namespace

void audit_seat_cpu(const AuditSeatArgs& args) {
  call(Cpu{"audit_seat"}, args);
}
void audit_plan_cpu(const AuditPlanArgs& args) {
  call(Cpu{"audit_plan"}, args);
}
void audit_resolve_cpu(const AuditResolveArgs& args) {
  call(Cpu{"audit_resolve"}, args);
}
void audit_blocks_cpu(const AuditBlocksArgs& args) {
  call(Cpu{"audit_blocks"}, args);
}
void audit_snapshot_cpu(const AuditSnapshotArgs& args) {
  call(Cpu{"audit_snapshot"}, args);
}

}  // namespace nwor
