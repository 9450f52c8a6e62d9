// SPDX-License-Identifier: Apache-2.0
//
// The audit on the CPU: who calls the passes of audit_rules.h.
#include <algorithm>
#include <vector>

#include "audit/audit_rules.h"
#include "audit/states_rules.h"
#include "common/check.h"
#include "common/copy_cpu.h"
#include "common/parallel.h"
#include "common/table_cpu.h"

namespace nwor {
namespace {

// One of `count` teams of a pass.
class Solo {
 public:
  // Of a sample of states.
  static constexpr int64_t kWordsOfLane = kSampleWords, kPartsOfLane = kSampleParts;

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
  int64_t warp() const { return 0; }
  int64_t num_warps() const { return 1; }
  void warp_sync() const {}
  template <typename Of>
  void sum_parts(uint32_t (&parts)[kSampleParts], const Of& of_word) const {
    for (int64_t p = 0; p < kSampleParts; ++p) {
      parts[p] = 0;
    }
    for (int64_t word = 0; word < kSampleWords; ++word) {
      parts[word / (kSampleWords / kSampleParts)] += of_word(word);
    }
  }
  int64_t part(int64_t p) const { return p; }
  uint64_t over_parts(uint64_t value) const { return value; }
  bool is_last_of(int64_t, int32_t&) const { return true; }
  void sync() const {}
  TeamSum sum(uint64_t value) const { return {value, value}; }
  uint64_t warp_sum(uint64_t value) const { return value; }
  uint64_t of_first(uint64_t value) const { return value; }
  uint64_t of_last_lane(uint64_t value) const { return value; }
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
  template <typename Pass>
  const int32_t* checksums(const Pass& pass, int64_t slot) {
    sums_.clear();
    for (int64_t i = 0; i < pass.num_parts; ++i) {
      const LayerTable& table = pass.parts[i].table;
      for (int64_t j = 0; j < table.num_layers; ++j) {
        sums_.push_back(layer_checksum(table.rows[j], pass.parts[i].runs, slot));
      }
    }
    return sums_.data();
  }

 private:
  int32_t layer_checksum(const LayerRow& layer, const RunList& runs, int64_t slot) {
    const bool is_packed = runs.data != nullptr;
    const auto* const from =
        reinterpret_cast<const uint8_t*>(layer.base) +
        (is_packed ? layer.block_offset(slot) : layer.slot_offset(slot));
    const int32_t* const run = is_packed ? runs.of(slot % runs.block_size) : nullptr;
    const int64_t num_runs = is_packed ? runs.num_runs : layer.num_heads;
    const auto length_of = [&](int64_t j) {
      return is_packed ? int64_t{run[2 * j + 1]} : layer.run_bytes;
    };
    size_t room = sizeof(uint64_t);
    for (int64_t j = 0; j < num_runs; ++j) {
      room += length_of(j);
    }
    bytes_.resize(std::max(bytes_.size(), room));
    uint8_t* to = bytes_.data();
    for (int64_t j = 0; j < num_runs; ++j) {
      copy_bytes(to, from + (is_packed ? run[2 * j] : j * layer.head_stride),
                 length_of(j));
      to += length_of(j);
    }
    std::memset(to, 0, sizeof(uint64_t));
    const int64_t size = to - bytes_.data();
    uint32_t sum = 0;
    for (int64_t word = 0; word * 8 < size; ++word) {
      uint64_t value = 0;
      std::memcpy(&value, bytes_.data() + word * 8, sizeof(value));
      sum += checksum_of(value, word);
    }
    return static_cast<int32_t>(sum);
  }

  int64_t number_;
  int64_t count_;
  std::vector<int64_t> room_;
  std::vector<int32_t> sums_;
  std::vector<uint8_t> bytes_;  // one layer's of a slot, and room for a word
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
    int64_t cost = 0;
    for (int64_t i = 0; i < pass.num_parts; ++i) {
      const AuditPart& part = pass.parts[i];
      cost += slot_cost(part.table, part.runs) * part.table.num_layers;
    }
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
    run_slots(pass, pass.places(team).count * pass.block_size);
  }

  int64_t num_parts(int64_t) const { return 1; }
  Cpu beside(const AuditGroup&) const { return *this; }

  void check(const AuditStep& args) const {
    const int32_t* const starts = args.query_start_loc;
    NWOR_CHECK(starts[0] == 0, op, "query_start_loc[0] is ", starts[0], "; must be 0");
    for (int64_t r = 0; r < args.num_reqs; ++r) {
      const int64_t seat = args.row_seats.at(r);
      NWOR_CHECK(seat >= 0 && seat < args.num_seats, op, "row_seats[", r, "] is ", seat,
                 "; must be between 0 and ", args.num_seats - 1);
      NWOR_CHECK(starts[r] <= starts[r + 1] && starts[r + 1] <= args.num_tokens, op,
                 "query_start_loc[", r + 1, "] is ", starts[r + 1],
                 "; must be between ", starts[r], " and ", args.num_tokens);
    }
  }
};

}  // namespace

template <typename Args>
void audit_cpu(const Args& args) {
  call(Cpu{Args::kOp}, args);
}
#define NWOR_OF(name) template void audit_cpu(const Audit##name##Args&);
NWOR_AUDIT_CALLS(NWOR_OF)

}  // namespace nwor
