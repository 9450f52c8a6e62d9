// SPDX-License-Identifier: Apache-2.0
//
// The audit on the CPU: the readable specification of what it finds. A step is plan,
// the forward, then resolve, adopt (for requests that are new in the batch), record
// and scan, in this order.
#include <algorithm>
#include <vector>

#include "audit.h"
#include "check.h"
#include "copy_cpu.h"
#include "parallel.h"
#include "table_cpu.h"

namespace nwor {
namespace {

// SlotRecord::content of a slot that was loaded over another text's bytes.
constexpr int32_t kReplaced = -1;

void report(const AuditGroup& group, const Finding& finding) {
  group.findings[group.header->num_findings % group.capacity] = finding;
  ++group.header->num_findings;
}

// What is found at `slot`, which belongs to `seat`.
Finding at_slot(const AuditGroup& group, FindingClass kind, int64_t slot,
                int64_t position, const Seat& seat, int64_t step) {
  const SlotRecord& record = group.records[slot];
  return {kind,        -1,   0, slot, position, seat.generation, record.generation,
          record.step, step, 0, 0,    0};
}

bool is_in_cache(const AuditGroup& group, int64_t slot) {
  return slot >= group.block_size && slot < group.num_slots;
}

// The first block of a request of `length` tokens that is still its own.
int64_t first_block(const AuditGroup& group, int64_t length, int64_t window) {
  return window > 0 ? std::max<int64_t>(0, length - window + 1) / group.block_size : 0;
}

void check_batch(const char* op, const AuditGroup& group, const AuditBatch& batch,
                 int64_t num_tokens) {
  NWOR_CHECK(batch.query_start_loc[0] == 0, op, "query_start_loc[0] is ",
             batch.query_start_loc[0], "; must be 0");
  for (int64_t r = 0; r < batch.num_reqs; ++r) {
    const int64_t seat = batch.row_seats[r];
    NWOR_CHECK(seat >= 0 && seat < group.num_seats, op, "row_seats[", r, "] is ", seat,
               "; must be between 0 and ", group.num_seats - 1);
    const int64_t begin = batch.query_start_loc[r];
    const int64_t end = batch.query_start_loc[r + 1];
    NWOR_CHECK(begin <= end && end <= num_tokens, op, "query_start_loc[", r + 1,
               "] is ", end, "; must be between ", begin, " and ", num_tokens);
  }
}

// H in front of `start`, where the request goes on. Behind a load that failed it
// goes back to a block's begin; from anywhere else its text is not known any more.
int64_t base_of(const AuditGroup& group, Seat& seat, int64_t seat_index,
                int64_t start) {
  if (start == seat.length) {
    return seat.hash;
  }
  if (start == 0) {
    return seat.seed;
  }
  if (start < seat.length && group.is_block_end(start - 1)) {
    const int64_t known =
        group.expected[seat_index * group.max_blocks + start / group.block_size - 1];
    if (known != 0) {
      return known;
    }
  }
  seat.opaque = 1;
  return seat.seed;
}

// Whether `seat` may write `position` to `slot`: the block is its own, and the one
// that its table has there.
bool may_write(const AuditGroup& group, const AuditBatch& batch, int64_t r,
               const Seat& seat, int64_t position, int64_t slot) {
  return slot == batch.slot(r, position) && slot < group.num_slots &&
         (group.owners[slot / group.block_size] == seat.generation ||
          (seat.loads && position < seat.hit_length));
}

// Compares what `slot` is said to hold with H = `hash`.
bool holds(const SlotRecord& record, int64_t hash) {
  return record.state == kSlotUnknown ||
         (record.state == kSlotCommitted && record.hash == hash);
}

void report_prefix(const AuditGroup& group, int64_t slot, int64_t position,
                   int64_t hash, int64_t seat_index, int64_t step) {
  Finding finding =
      at_slot(group, kWrongPrefix, slot, position, group.seats[seat_index], step);
  finding.expected = hash;
  finding.found =
      group.records[slot].state == kSlotCommitted ? group.records[slot].hash : 0;
  report(group, finding);
  // Once for a block: its end is not looked at any more.
  group.expected[seat_index * group.max_blocks + position / group.block_size] = 0;
}

// Compares every slot of a full block, from its end back: a record's own token leads
// from its H to the one before.
void check_block(const AuditGroup& group, const AuditBatch& batch, int64_t r, int64_t b,
                 int64_t step) {
  const int64_t seat_index = batch.row_seats[r];
  const int64_t hash_at_end = group.expected[seat_index * group.max_blocks + b];
  if (hash_at_end == 0 || group.seats[seat_index].opaque) {
    return;
  }
  int64_t hash = hash_at_end;
  for (int64_t p = (b + 1) * group.block_size - 1; p >= b * group.block_size; --p) {
    const int64_t slot = batch.slot(r, p);
    if (!is_in_cache(group, slot) || group.records[slot].state == kSlotUnknown) {
      return;
    }
    if (!holds(group.records[slot], hash)) {
      report_prefix(group, slot, p, hash, seat_index, step);
      return;
    }
    hash = subtract(hash, identity_of(group.records[slot].token, p));
  }
}

// --- bytes ---------------------------------------------------------------------

// The checksums of one slot in all layers of a table.
class SlotChecksums {
 public:
  explicit SlotChecksums(const AuditBytes& bytes) : bytes_(bytes) {
    int64_t longest = 0;
    for (int64_t i = 0; i < bytes.table.num_layers; ++i) {
      const LayerRow& layer = bytes.table.rows[i];
      longest = std::max(longest, layer.num_heads * layer.run_bytes);
    }
    if (bytes.runs.data != nullptr) {
      longest = check_runs("audit", bytes.table, bytes.runs, 0);
    }
    buffer_.resize((longest + 7) / 8);
  }

  void of(int64_t slot, int32_t* checksums) {
    for (int64_t i = 0; i < bytes_.table.num_layers; ++i) {
      checksums[i] = of_layer(bytes_.table.rows[i], slot);
    }
  }

 private:
  int32_t of_layer(const LayerRow& layer, int64_t slot) {
    const uint8_t* base = reinterpret_cast<const uint8_t*>(layer.base);
    uint8_t* to = reinterpret_cast<uint8_t*>(buffer_.data());
    uint8_t* const begin = to;
    buffer_.back() = 0;
    if (bytes_.runs.data != nullptr) {
      const uint8_t* block = base + layer.block_offset(slot);
      const int32_t* run = bytes_.runs.of(slot % bytes_.runs.block_size);
      for (int64_t j = 0; j < bytes_.runs.num_runs; ++j) {
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
      sum += checksum_of(buffer_[word], word);
    }
    return static_cast<int32_t>(sum);
  }

  const AuditBytes& bytes_;
  std::vector<uint64_t> buffer_;
};

// [slots.size(), num_layers]: checksums of each slot; those that are -1 are left out.
std::vector<int32_t> checksums_of(const AuditBytes& bytes,
                                  const std::vector<int64_t>& slots) {
  const int64_t num_layers = bytes.table.num_layers;
  std::vector<int32_t> sums(slots.size() * num_layers);
  const int64_t cost = slot_cost(bytes.table, bytes.runs) * num_layers;
  parallel_for(static_cast<int64_t>(slots.size()),
               std::max<int64_t>(1, kCostPerThread / cost),
               [&](int64_t begin, int64_t end) {
                 SlotChecksums slot_checksums(bytes);
                 for (int64_t i = begin; i < end; ++i) {
                   if (slots[i] >= 0) {
                     slot_checksums.of(slots[i], sums.data() + i * num_layers);
                   }
                 }
               });
  return sums;
}

// Reports what a row's checksums say of it, before they are recorded.
void judge_row(const AuditRecordArgs& args, int64_t index, const int32_t* sums,
               const int32_t* before) {
  const AuditGroup& group = args.group;
  const PlanRow& row = group.plan[index];
  SlotRecord& record = group.records[row.slot];
  const Seat& seat = group.seats[row.seat];
  const int64_t num_layers = args.bytes.table.num_layers;
  int64_t first_same = -1;
  int64_t first_other = -1;
  int64_t num_same = 0;
  for (int64_t i = num_layers - 1; i >= 0; --i) {
    const bool is_same = sums[i] == before[i];
    num_same += is_same;
    (is_same ? first_same : first_other) = i;
  }
  Finding finding = at_slot(group, kChanged, row.slot, row.position, seat, args.step);
  finding.table = args.bytes.table_index;
  if (row.state == kSlotRejected) {
    if (args.is_undone && num_same < num_layers) {
      finding.writer = seat.generation;
      finding.writer_step = args.step;
      finding.layer = first_other;
      finding.num_layers = num_layers - num_same;
      finding.expected = static_cast<uint32_t>(before[first_other]);
      finding.found = static_cast<uint32_t>(sums[first_other]);
      report(group, finding);
    }
    return;
  }
  // Another token changes the bytes of every layer; the same one behind another prefix
  // need not (it never does in the first layer).
  if (seat.opaque || row.old.token == row.token || num_same == 0) {
    return;
  }
  // One checksum of 32 bits in billions agrees by chance: it takes a second one, of
  // another layer, or of this layer at the position before.
  bool is_sure = num_same > 1;
  if (!is_sure && index > 0) {
    const PlanRow& previous = group.plan[index - 1];
    is_sure = previous.seat == row.seat && previous.slot >= 0 &&
              group.records[previous.slot].content == 2 + first_same;
  }
  record.content = static_cast<int32_t>(2 + first_same);
  if (is_sure) {
    finding.kind = kMissingWrite;
    finding.layer = first_same;
    finding.num_layers = num_same;
    finding.expected = row.hash;
    finding.found = row.old.hash;
    report(group, finding);
  }
}

}  // namespace

void audit_seat_cpu(const AuditSeatArgs& args) {
  const AuditGroup& group = args.group;
  Seat& seat = group.seats[args.seat];
  seat = args.fresh;
  seat.hash = seat.seed;
  seat.length = args.length;
  int64_t* expected = group.expected + args.seat * group.max_blocks;
  std::fill_n(expected, group.max_blocks, int64_t{0});
  for (int64_t p = 0; p < args.length; ++p) {
    seat.hash = add(seat.hash, identity_of(args.tokens[p], p));
    if (group.is_block_end(p)) {
      expected[p / group.block_size] = seat.hash;
    }
  }
}

void audit_plan_cpu(const AuditPlanArgs& args) {
  const AuditGroup& group = args.group;
  const AuditBatch& batch = args.batch;
  check_batch("audit_plan", group, batch, args.num_tokens);
  for (int64_t r = 0; r < batch.num_reqs; ++r) {
    const int64_t begin = batch.query_start_loc[r];
    const int64_t end = batch.query_start_loc[r + 1];
    if (begin == end) {
      continue;
    }
    const int64_t seat_index = batch.row_seats[r];
    Seat& seat = group.seats[seat_index];
    const int64_t start = args.positions[begin];
    int64_t hash = base_of(group, seat, seat_index, start);
    seat.hash = hash;
    seat.length = start;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t position = args.positions[i];
      const int64_t slot = args.slot_mapping[i];
      hash = add(hash, identity_of(args.tokens[i], position));
      PlanRow& row = group.plan[i];
      row = {-1, hash, position, args.tokens[i], kSlotPlanned, seat_index, {}, 0};
      if (slot < 0) {
        continue;
      }
      if (!may_write(group, batch, r, seat, position, slot)) {
        Finding finding{kForeignWrite,
                        -1,
                        0,
                        slot,
                        position,
                        0,
                        seat.generation,
                        args.step,
                        args.step,
                        batch.slot(r, position),
                        slot,
                        0};
        if (slot < group.num_slots) {
          finding.owner = group.owners[slot / group.block_size];
        }
        report(group, finding);
      }
      if (slot >= group.num_slots) {
        continue;
      }
      SlotRecord& record = group.records[slot];
      row.slot = slot;
      row.old = record;
      if (record.state == kSlotPlanned) {
        row.old.state = kSlotUnknown;  // a step that failed; it has no checksums
      }
      record = {hash,
                args.tokens[i],
                static_cast<int32_t>(position),
                static_cast<int32_t>(args.step),
                static_cast<int32_t>(seat.generation),
                kSlotPlanned,
                0};
    }
  }
}

void audit_resolve_cpu(const AuditResolveArgs& args) {
  const AuditGroup& group = args.group;
  const AuditBatch& batch = args.batch;
  check_batch("audit_resolve", group, batch, group.max_tokens);
  // What is kept, of all requests: one may have found another's block in this step.
  for (int64_t r = 0; r < batch.num_reqs; ++r) {
    const int64_t begin = batch.query_start_loc[r];
    const int64_t end = batch.query_start_loc[r + 1];
    const int64_t seat_index = batch.row_seats[r];
    Seat& seat = group.seats[seat_index];
    int64_t num_rejected = 0;
    if (args.cu_num_logits != nullptr) {
      const int64_t before = r == 0 ? 0 : args.cu_num_logits[r - 1];
      const int64_t num_drafts = args.cu_num_logits[r] - before - 1;
      num_rejected = num_drafts - num_accepted(args.acceptance, r, num_drafts);
    }
    for (int64_t i = begin; i < end; ++i) {
      PlanRow& row = group.plan[i];
      row.state = i < end - num_rejected ? kSlotCommitted : kSlotRejected;
      if (row.slot >= 0) {
        SlotRecord& record = group.records[row.slot];
        if (record.state != kSlotPlanned || record.hash != row.hash) {
          // Another row of this step went to the same slot.
        } else if (row.state == kSlotRejected && args.is_undone) {
          record = row.old;
        } else {
          record.state =
              seat.opaque && row.state == kSlotCommitted ? kSlotUnknown : row.state;
        }
      }
      if (row.state == kSlotCommitted) {
        seat.hash = row.hash;
        seat.length = row.position + 1;
        if (group.is_block_end(row.position) && !seat.opaque) {
          group.expected[seat_index * group.max_blocks +
                         row.position / group.block_size] = row.hash;
        }
      }
    }
  }
  for (int64_t r = 0; r < batch.num_reqs; ++r) {
    const int64_t seat_index = batch.row_seats[r];
    const Seat& seat = group.seats[seat_index];
    if (seat.opaque) {
      continue;
    }
    // This step's rows, where the table has them.
    for (int64_t i = batch.query_start_loc[r]; i < batch.query_start_loc[r + 1]; ++i) {
      const PlanRow& row = group.plan[i];
      const int64_t slot = batch.slot(r, row.position);
      if (row.state != kSlotCommitted || row.slot < 0 || !is_in_cache(group, slot)) {
        continue;
      }
      ++group.header->num_identities;
      if (!holds(group.records[slot], row.hash)) {
        report_prefix(group, slot, row.position, row.hash, seat_index, args.step);
      }
    }
    // The ends of all blocks.
    const int64_t* expected = group.expected + seat_index * group.max_blocks;
    for (int64_t b = first_block(group, seat.length, args.window);
         b < seat.length / group.block_size; ++b) {
      const int64_t position = (b + 1) * group.block_size - 1;
      const int64_t slot = batch.slot(r, position);
      const bool is_adopted_soon = seat.is_new && position < seat.hit_length;
      if (expected[b] == 0 || is_adopted_soon || !is_in_cache(group, slot)) {
        continue;
      }
      ++group.header->num_identities;
      if (!holds(group.records[slot], expected[b])) {
        report_prefix(group, slot, position, expected[b], seat_index, args.step);
      }
    }
  }
}

void audit_adopt_cpu(const AuditAdoptArgs& args) {
  const AuditGroup& group = args.group;
  const int64_t seat_index = args.batch.row_seats[args.row];
  Seat& seat = group.seats[seat_index];
  seat.is_new = 0;
  if (seat.opaque) {
    return;
  }
  const int64_t first = first_block(group, args.length, args.window) * group.block_size;
  int64_t hash = seat.seed;
  int64_t reported_block = -1;
  for (int64_t p = 0; p < args.length; ++p) {
    hash = add(hash, identity_of(args.tokens[p], p));
    const int64_t slot = args.batch.slot(args.row, p);
    if (p < first || !is_in_cache(group, slot)) {
      continue;
    }
    ++group.header->num_identities;
    SlotRecord& record = group.records[slot];
    if (record.state == kSlotUnknown || record.state == kSlotLoaded ||
        seat.loads == kUntoldLoads) {
      ++group.header->num_unverified;
      const bool is_other = record.state == kSlotLoaded && record.content != 0 &&
                            record.token != args.tokens[p];
      record = {hash,
                args.tokens[p],
                static_cast<int32_t>(p),
                static_cast<int32_t>(args.step),
                static_cast<int32_t>(seat.generation),
                kSlotCommitted,
                is_other ? kReplaced : 0};
    } else if (!holds(record, hash) && p / group.block_size != reported_block) {
      reported_block = p / group.block_size;
      report_prefix(group, slot, p, hash, seat_index, args.step);
    }
  }
}

void audit_record_cpu(const AuditRecordArgs& args) {
  const AuditGroup& group = args.group;
  const AuditBytes& bytes = args.bytes;
  check_layers("audit_record", bytes.table, bytes.runs);
  std::vector<int64_t> slots(args.num_tokens);
  for (int64_t i = 0; i < args.num_tokens; ++i) {
    slots[i] = group.plan[i].slot;
  }
  const std::vector<int32_t> sums = checksums_of(bytes, slots);
  const int64_t num_layers = bytes.table.num_layers;
  for (int64_t i = 0; i < args.num_tokens; ++i) {
    const PlanRow& row = group.plan[i];
    if (row.slot < 0) {
      continue;
    }
    const int32_t* found = sums.data() + i * num_layers;
    int32_t* known = bytes.contents + row.slot * bytes.num_columns + bytes.first_column;
    if (row.old.content != 0) {
      judge_row(args, i, found, known);
    }
    std::copy_n(found, num_layers, known);
    if (args.is_last) {
      int32_t& content = group.records[row.slot].content;
      content = std::max(content, 1);
    }
  }
}

void audit_scan_cpu(const AuditScanArgs& args) {
  const AuditGroup& group = args.group;
  const AuditBatch& batch = args.batch;
  const AuditBytes& bytes = args.bytes;
  check_layers("audit_scan", bytes.table, bytes.runs);
  // The blocks of the batch, row by row, from the cursor on and around.
  struct Place {
    int64_t row;
    int64_t block;
  };
  std::vector<Place> places;
  const int64_t first_row = args.row < 0 ? 0 : args.row;
  const int64_t last_row = args.row < 0 ? batch.num_reqs : args.row + 1;
  for (int64_t r = first_row; r < last_row; ++r) {
    const Seat& seat = group.seats[batch.row_seats[r]];
    const int64_t length = args.row < 0 ? seat.length : seat.hit_length;
    const int64_t num_blocks = (length + group.block_size - 1) / group.block_size;
    for (int64_t b = first_block(group, length, args.window); b < num_blocks; ++b) {
      places.push_back({r, b});
    }
  }
  const int64_t num_places = static_cast<int64_t>(places.size());
  const int64_t count = std::min(args.num_blocks, num_places);
  const int64_t start = args.row < 0 ? group.header->cursor : 0;
  std::vector<int64_t> slots;
  std::vector<int64_t> positions;
  std::vector<int64_t> rows;
  for (int64_t n = 0; n < count; ++n) {
    const Place& place = places[(start + n) % num_places];
    const Seat& seat = group.seats[batch.row_seats[place.row]];
    if (args.is_last && (place.block + 1) * group.block_size <= seat.length) {
      check_block(group, batch, place.row, place.block, args.step);
    }
    for (int64_t p = place.block * group.block_size;
         p < std::min((place.block + 1) * group.block_size, seat.length); ++p) {
      const int64_t slot = batch.slot(place.row, p);
      if (is_in_cache(group, slot) && (group.records[slot].state == kSlotCommitted ||
                                       group.records[slot].state == kSlotUnknown)) {
        slots.push_back(slot);
        positions.push_back(p);
        rows.push_back(place.row);
      }
    }
  }
  if (args.is_last && args.row < 0 && num_places > 0) {
    group.header->cursor = (start + count) % num_places;
  }
  const std::vector<int32_t> sums = checksums_of(bytes, slots);
  const int64_t num_layers = bytes.table.num_layers;
  for (size_t i = 0; i < slots.size(); ++i) {
    SlotRecord& record = group.records[slots[i]];
    const int32_t* found = sums.data() + i * num_layers;
    int32_t* known = bytes.contents + slots[i] * bytes.num_columns + bytes.first_column;
    Finding finding = at_slot(group, kChanged, slots[i], positions[i],
                              group.seats[batch.row_seats[rows[i]]], args.step);
    finding.table = bytes.table_index;
    // What has no checksums yet was taken over: it gets some.
    if (record.content == kReplaced) {
      // A single layer's checksum may agree by chance.
      if (num_layers > 1 && std::equal(found, found + num_layers, known)) {
        finding.kind = kNeverLoaded;
        finding.layer = 0;
        finding.num_layers = num_layers;
        finding.expected = record.hash;
        report(group, finding);
      }
    } else if (record.content != 0 && !std::equal(found, found + num_layers, known)) {
      for (int64_t layer = num_layers - 1; layer >= 0; --layer) {
        if (found[layer] != known[layer]) {
          finding.layer = layer;
          ++finding.num_layers;
          finding.expected = static_cast<uint32_t>(known[layer]);
          finding.found = static_cast<uint32_t>(found[layer]);
        }
      }
      report(group, finding);
    }
    group.header->num_contents += args.is_last && record.content > 0;
    std::copy_n(found, num_layers, known);
    if (args.is_last) {
      record.content = std::max(record.content, 1);
    }
  }
}

void audit_hand_on_cpu(const AuditHandOnArgs& args) {
  const AuditGroup& group = args.group;
  const int64_t num_blocks = group.num_slots / group.block_size;
  for (int64_t i = 0; i < args.count; ++i) {
    const int64_t block = args.blocks[i];
    NWOR_CHECK(block >= 0 && block < num_blocks, "audit_hand_on", "blocks[", i, "] is ",
               block, "; must be between 0 and ", num_blocks - 1);
    SlotRecord* records = group.records + block * group.block_size;
    if (args.fills) {
      for (int64_t o = 0; o < group.block_size; ++o) {
        records[o].state = kSlotLoaded;
      }
      continue;
    }
    for (int64_t o = block == 0 ? group.block_size : 0; o < group.block_size; ++o) {
      if (records[o].state == kSlotUnknown) {
        break;
      }
      // Each slot's H follows from the one before, or it is of another text.
      const bool is_next =
          o == 0 || records[o].hash ==
                        add(records[o - 1].hash,
                            identity_of(records[o].token, records[o - 1].position + 1));
      ++group.header->num_identities;
      if (records[o].state == kSlotCommitted && is_next) {
        continue;
      }
      Seat seat{};
      seat.generation = group.owners[block];
      const int64_t position = o == 0 ? records[o].position : records[0].position + o;
      Finding finding = at_slot(group, kHandedOn, block * group.block_size + o,
                                position, seat, args.step);
      finding.expected = kSlotCommitted;
      finding.found = records[o].state;
      report(group, finding);
      break;
    }
  }
}

void audit_snapshot_cpu(const AuditSnapshotArgs& args) {
  const AuditGroup& group = args.group;
  const AuditBytes& bytes = args.bytes;
  check_layers("audit_snapshot", bytes.table, bytes.runs);
  const int64_t num_layers = bytes.table.num_layers;
  for (int64_t first = 0; first < group.num_slots; first += group.block_size) {
    std::vector<int64_t> slots;
    for (int64_t slot = first; slot < first + group.block_size; ++slot) {
      slots.push_back(slot);
    }
    const std::vector<int32_t> sums = checksums_of(bytes, slots);
    for (int64_t o = 0; o < group.block_size; ++o) {
      std::copy_n(
          sums.data() + o * num_layers, num_layers,
          bytes.contents + (first + o) * bytes.num_columns + bytes.first_column);
      group.records[first + o].content = 1;
    }
  }
}

void audit_hand_out_cpu(const AuditHandOutArgs& args) {
  for (int64_t i = 0; i < args.count; ++i) {
    const int64_t block = args.blocks[i];
    NWOR_CHECK(block >= 0 && block < args.num_blocks, "audit_hand_out", "blocks[", i,
               "] is ", block, "; must be between 0 and ", args.num_blocks - 1);
    args.owners[block] = static_cast<int32_t>(args.generation);
    if (args.state < 0) {
      continue;
    }
    for (int64_t o = 0; o < args.block_size; ++o) {
      SlotRecord& record = args.records[block * args.block_size + o];
      record = {
          0, -1, 0, record.step, record.generation, static_cast<int32_t>(args.state),
          0};
    }
  }
}

}  // namespace nwor
