// SPDX-License-Identifier: Apache-2.0
//
// The audit on the CPU: the readable specification of what it finds, with
// audit_rules.h. A step is plan, the forward, then resolve, adopt (for requests that
// are new in the batch), record, scan and publish, in this order.
#include <algorithm>
#include <vector>

#include "audit_rules.h"
#include "check.h"
#include "copy_cpu.h"
#include "parallel.h"
#include "table_cpu.h"

namespace nwor {
namespace {

void check_batch(const char* op, const AuditGroup& group, const AuditBatch& batch,
                 int64_t num_tokens) {
  NWOR_CHECK(batch.query_start_loc[0] == 0, op, "query_start_loc[0] is ",
             batch.query_start_loc[0], "; must be 0");
  for (int64_t r = 0; r < batch.num_reqs; ++r) {
    const int64_t seat = batch.row_seats.at(r);
    NWOR_CHECK(seat >= 0 && seat < group.num_seats, op, "row_seats[", r, "] is ", seat,
               "; must be between 0 and ", group.num_seats - 1);
    const int64_t begin = batch.query_start_loc[r];
    const int64_t end = batch.query_start_loc[r + 1];
    NWOR_CHECK(begin <= end && end <= num_tokens, op, "query_start_loc[", r + 1,
               "] is ", end, "; must be between ", begin, " and ", num_tokens);
  }
}

// Compares every slot of a full block, from its end back: a record's own token leads
// from its H to the one before.
void check_block(const AuditGroup& group, const AuditBatch& batch, int64_t r, int64_t b,
                 int64_t step) {
  const int64_t seat_index = batch.row_seats.at(r);
  int64_t hash = expected_at(group, seat_index, b);
  if (hash == 0 || group.seats[seat_index].opaque) {
    return;
  }
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

Compared compare(const int32_t* known, const int32_t* found, int64_t num_layers) {
  Compared compared{known, found, num_layers, 0, -1, -1};
  for (int64_t i = num_layers - 1; i >= 0; --i) {
    const bool is_same = found[i] == known[i];
    compared.num_same += is_same;
    (is_same ? compared.first_same : compared.first_other) = i;
  }
  return compared;
}

}  // namespace

void audit_seat_cpu(const AuditSeatArgs& args) {
  const AuditGroup& group = args.group;
  Seat& seat = group.seats[args.seat];
  seat = args.fresh;
  seat.hash = seat.seed;
  seat.length = args.length;
  std::fill_n(&expected_at(group, args.seat, 0), group.max_blocks, int64_t{0});
  for (int64_t p = 0; p < args.length; ++p) {
    seat.hash = add(seat.hash, identity_of(args.tokens[p], p));
    if (group.is_block_end(p)) {
      expected_at(group, args.seat, p / group.block_size) = seat.hash;
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
    int64_t hash = base_of(group, batch.row_seats.at(r), args.positions[begin]);
    for (int64_t i = begin; i < end; ++i) {
      hash = add(hash, identity_of(args.tokens[i], args.positions[i]));
      plan_row(args, r, i, hash);
    }
  }
}

void audit_resolve_cpu(const AuditResolveArgs& args) {
  const AuditGroup& group = args.group;
  const AuditBatch& batch = args.batch;
  check_batch("audit_resolve", group, batch, group.max_tokens);
  // What is kept, of all requests: one may have found another's block in this step.
  for (int64_t r = 0; r < batch.num_reqs; ++r) {
    const int64_t num_drafts = num_drafts_of(args, r);
    const int64_t end = batch.query_start_loc[r + 1];
    const int64_t accepted =
        num_drafts > 0 ? num_accepted(args.acceptance, r, num_drafts) : 0;
    const int64_t kept_end = kept_end_of(end, num_drafts, accepted);
    for (int64_t i = batch.query_start_loc[r]; i < end; ++i) {
      keep_row(args, r, i, i < kept_end, i == kept_end - 1);
    }
  }
  for (int64_t r = 0; r < batch.num_reqs; ++r) {
    const Seat& seat = group.seats[batch.row_seats.at(r)];
    if (seat.opaque) {
      continue;
    }
    int64_t num_compared = 0;
    for (int64_t i = batch.query_start_loc[r]; i < batch.query_start_loc[r + 1]; ++i) {
      num_compared += check_row(args, r, i);
    }
    for (int64_t b = first_block(group, seat.length, args.window);
         b < least(seat.length / group.block_size, group.max_blocks); ++b) {
      num_compared += check_end(args, r, b);
    }
    count(group.header->num_identities, num_compared);
  }
}

void audit_adopt_cpu(const AuditAdoptArgs& args) {
  const AuditGroup& group = args.group;
  const int64_t seat_index = args.batch.row_seats.at(args.row);
  Seat& seat = group.seats[seat_index];
  seat.is_new = 0;
  if (seat.opaque) {
    return;
  }
  const int64_t end = last_block(group, args.length);
  int64_t b = first_block(group, args.length, args.window);
  int64_t hash = b < end ? hash_before(group, seat_index, b) : 0;
  for (; b < end; ++b) {
    // A block that is reported is not known to the next any more.
    const int64_t next = b + 1 < end ? hash_before(group, seat_index, b + 1) : 0;
    adopt_block(args, b, hash);
    hash = next;
  }
}

void audit_record_cpu(const AuditRecordArgs& args) {
  const AuditGroup& group = args.group;
  const AuditBytes& bytes = args.bytes;
  check_layers("audit_record", bytes.table, bytes.runs);
  std::vector<int64_t> slots(args.num_tokens);
  for (int64_t i = 0; i < args.num_tokens; ++i) {
    slots[i] = group.plan[i].suspect < 0 ? -1 : group.plan[i].slot;
  }
  const std::vector<int32_t> sums = checksums_of(bytes, slots);
  const int64_t num_layers = bytes.table.num_layers;
  for (int64_t i = 0; i < args.num_tokens; ++i) {
    if (slots[i] < 0) {
      continue;
    }
    const int32_t* found = sums.data() + i * num_layers;
    int32_t* known = bytes.known(slots[i]);
    if (group.plan[i].old.content != kContentNone) {
      judge_row(args, i, compare(known, found, num_layers));
    }
    std::copy_n(found, num_layers, known);
    if (args.is_last) {
      group.records[slots[i]].content = kContentKnown;
    }
  }
  if (group.header->num_suspects == 0) {
    return;
  }
  group.header->num_suspects = 0;
  for (int64_t i = 0; i < args.num_tokens; ++i) {
    judge_suspect(args, i);
  }
  for (int64_t i = 0; i < args.num_tokens; ++i) {
    group.plan[i].suspect = least(group.plan[i].suspect, 0);
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
    const Seat& seat = group.seats[batch.row_seats.at(r)];
    const int64_t length = args.row < 0 ? seat.length : seat.hit_length;
    for (int64_t b = first_block(group, length, args.window);
         b < last_block(group, length); ++b) {
      places.push_back({r, b});
    }
  }
  const int64_t num_places = static_cast<int64_t>(places.size());
  const int64_t count_places = least(args.num_blocks, num_places);
  const int64_t start = args.row < 0 ? group.header->cursor : 0;
  std::vector<int64_t> slots;
  std::vector<int64_t> positions;
  std::vector<int64_t> rows;
  for (int64_t n = 0; n < count_places; ++n) {
    const Place& place = places[(start + n) % num_places];
    const Seat& seat = group.seats[batch.row_seats.at(place.row)];
    if (args.is_last && (place.block + 1) * group.block_size <= seat.length) {
      check_block(group, batch, place.row, place.block, args.step);
    }
    for (int64_t p = place.block * group.block_size;
         p < std::min((place.block + 1) * group.block_size, seat.length); ++p) {
      const int64_t slot = batch.slot(place.row, p);
      if (is_in_cache(group, slot) && has_bytes(group.records[slot])) {
        slots.push_back(slot);
        positions.push_back(p);
        rows.push_back(place.row);
      }
    }
  }
  if (args.row < 0 && num_places > 0) {
    group.header->next_cursor = (start + count_places) % num_places;
  }
  const std::vector<int32_t> sums = checksums_of(bytes, slots);
  const int64_t num_layers = bytes.table.num_layers;
  for (size_t i = 0; i < slots.size(); ++i) {
    SlotRecord& record = group.records[slots[i]];
    const int32_t* found = sums.data() + i * num_layers;
    int32_t* known = bytes.known(slots[i]);
    Stored stored{is_fresh(record.content) ? stored_slot(group, slots[i]) : kNotStored,
                  {}};
    if (stored.slot >= 0) {
      stored.compared = compare(bytes.known(stored.slot), found, num_layers);
    }
    judge_slot(args, batch.row_seats.at(rows[i]), slots[i], positions[i],
               record.content, compare(known, found, num_layers), stored);
    group.header->num_contents += args.is_last && record.content == kContentKnown;
    std::copy_n(found, num_layers, known);
    if (args.is_last) {
      record.content = kContentKnown;
    }
  }
}

void audit_hand_on_cpu(const AuditHandOnArgs& args) {
  const AuditGroup& group = args.group;
  for (int64_t i = 0; i < args.count; ++i) {
    const int64_t number = args.numbers[i];
    hand_on_block(group, args.blocks[i], number, args.step, args.fills);
    if (args.fills || number == 0) {
      continue;
    }
    const int64_t kept = group.kept_block(number);
    const int64_t from = args.blocks[i] * group.block_size;
    const int64_t to = kept * group.block_size;
    group.stores[kept] = number;
    std::copy_n(group.records + from, group.block_size, group.records + to);
    std::copy_n(args.contents + from * args.num_columns,
                group.block_size * args.num_columns,
                args.contents + to * args.num_columns);
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
      if (!is_taken(group.records[first + o], args.again)) {
        continue;
      }
      std::copy_n(sums.data() + o * num_layers, num_layers, bytes.known(first + o));
      group.records[first + o].content = kContentKnown;
    }
  }
}

void audit_hand_out_cpu(const AuditHandOutArgs& args) {
  for (int64_t i = 0; i < args.count; ++i) {
    hand_out_block(args.group, args.blocks[i], args.generations[i]);
  }
}

void audit_publish_cpu(const AuditPublishArgs& args) {
  std::copy_n(args.group.findings, num_to_publish(args.group), args.findings_to);
  end_step(args);
}

}  // namespace nwor
