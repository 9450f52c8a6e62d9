// SPDX-License-Identifier: Apache-2.0
//
// What the audit does with one row, slot or block, the same on CPU and CUDA; who loops
// over them is in audit_cpu.cpp and audit_cuda.cu.
//
// On CUDA many threads are here at once. What two of them may touch is counted or
// exchanged by atomics: the header, a record's state in plan (of the rows that go to
// one slot one gets what the slot held), a record's content in scan (requests share
// blocks). Everything else belongs to one thread of a launch, and launches follow each
// other.
#pragma once

#include "audit.h"

namespace nwor {

NWOR_HOST_DEVICE inline uint64_t mix64(uint64_t value) {
  // splitmix64's finaliser.
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31);
}

// What token `token` at `position` adds to H.
NWOR_HOST_DEVICE inline int64_t identity_of(int64_t token, int64_t position) {
  return static_cast<int64_t>(
      mix64(static_cast<uint64_t>(token) * 0x9E3779B97F4A7C15ULL +
            mix64(static_cast<uint64_t>(position) + 1)));
}

// Both wrap around.
NWOR_HOST_DEVICE inline int64_t add(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
NWOR_HOST_DEVICE inline int64_t subtract(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}

// What word number `index` of a slot, 8 bytes, adds to its checksum in a layer.
NWOR_HOST_DEVICE inline uint32_t checksum_of(uint64_t word, int64_t index) {
  return static_cast<uint32_t>(
      mix64(word + static_cast<uint64_t>(index + 1) * 0x9E3779B97F4A7C15ULL) >> 32);
}

// `by` more, and what it was.
NWOR_HOST_DEVICE inline int64_t count(int64_t& counter, int64_t by = 1) {
#ifdef __CUDA_ARCH__
  return static_cast<int64_t>(atomicAdd(reinterpret_cast<unsigned long long*>(&counter),
                                        static_cast<unsigned long long>(by)));
#else
  const int64_t before = counter;
  counter += by;
  return before;
#endif
}

// `value` instead, and what it was.
NWOR_HOST_DEVICE inline int32_t exchange(int32_t& place, int32_t value) {
#ifdef __CUDA_ARCH__
  return atomicExch(&place, value);
#else
  const int32_t before = place;
  place = value;
  return before;
#endif
}

NWOR_HOST_DEVICE inline int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}
NWOR_HOST_DEVICE inline int64_t most(int64_t a, int64_t b) {
  return a < b ? b : a;
}

NWOR_HOST_DEVICE inline void report(const AuditGroup& group, const Finding& finding) {
  const int64_t number = count(group.header->num_findings);
  if (number - group.header->num_published < group.capacity) {
    group.findings[number - group.header->num_published] = finding;
  }
}

// What is found at `slot`, which belongs to `seat`.
NWOR_HOST_DEVICE inline Finding at_slot(const AuditGroup& group, FindingClass kind,
                                        int64_t slot, int64_t position,
                                        const Seat& seat, int64_t step) {
  const SlotRecord& record = group.records[slot];
  return {kind,        -1,   0, slot, position, seat.generation, record.generation,
          record.step, step, 0, 0,    0};
}

// Of a write of `token` by `seat`, which makes its text H = `hash`.
NWOR_HOST_DEVICE inline SlotRecord written(int64_t hash, int32_t token,
                                           int64_t position, int64_t step,
                                           const Seat& seat, SlotState state,
                                           SlotContent content) {
  return {hash,
          token,
          static_cast<int32_t>(position),
          static_cast<int32_t>(step),
          static_cast<int32_t>(seat.generation),
          state,
          content};
}

NWOR_HOST_DEVICE inline bool is_in_cache(const AuditGroup& group, int64_t slot) {
  return slot >= group.block_size && slot < group.num_slots;
}

// The first block of a request of `length` tokens that is still its own, and the one
// behind its last.
NWOR_HOST_DEVICE inline int64_t first_block(const AuditGroup& group, int64_t length,
                                            int64_t window) {
  return window > 0 ? most(0, length - window + 1) / group.block_size : 0;
}
NWOR_HOST_DEVICE inline int64_t last_block(const AuditGroup& group, int64_t length) {
  return least((length + group.block_size - 1) / group.block_size, group.max_blocks);
}

// Compares what a slot is said to hold with H = `hash`.
NWOR_HOST_DEVICE inline bool holds(const SlotRecord& record, int64_t hash) {
  return record.state == kSlotUnknown ||
         (record.state == kSlotCommitted && record.hash == hash);
}

NWOR_HOST_DEVICE inline int64_t& expected_at(const AuditGroup& group, int64_t seat,
                                             int64_t block) {
  return group.expected[seat * group.max_blocks + block];
}

NWOR_HOST_DEVICE inline void report_prefix(const AuditGroup& group, int64_t slot,
                                           int64_t position, int64_t hash,
                                           int64_t seat_index, int64_t step) {
  Finding finding =
      at_slot(group, kWrongPrefix, slot, position, group.seats[seat_index], step);
  finding.expected = hash;
  finding.found =
      group.records[slot].state == kSlotCommitted ? group.records[slot].hash : 0;
  report(group, finding);
  // Once for a block: its end is not looked at any more.
  if (position / group.block_size < group.max_blocks) {
    expected_at(group, seat_index, position / group.block_size) = 0;
  }
}

// --- plan ------------------------------------------------------------------------

// H in front of `start`, where the request goes on. Behind a load that failed it
// goes back to a block's begin; from anywhere else its text is not known any more.
NWOR_HOST_DEVICE inline int64_t base_of(const AuditGroup& group, int64_t seat_index,
                                        int64_t start) {
  Seat& seat = group.seats[seat_index];
  int64_t hash = seat.seed;
  if (start == seat.length) {
    hash = seat.hash;
  } else if (start != 0) {
    const bool is_back = start < seat.length && group.is_block_end(start - 1) &&
                         start / group.block_size <= group.max_blocks;
    const int64_t known =
        is_back ? expected_at(group, seat_index, start / group.block_size - 1) : 0;
    if (known != 0) {
      hash = known;
    } else {
      seat.opaque = 1;
    }
  }
  seat.hash = hash;
  seat.length = start;
  return hash;
}

// Whether `seat` may write `position` to `slot`: the block is its own, and the one
// that its table has there.
NWOR_HOST_DEVICE inline bool may_write(const AuditGroup& group, const AuditBatch& batch,
                                       int64_t r, const Seat& seat, int64_t position,
                                       int64_t slot) {
  return slot == batch.slot(r, position) && slot < group.num_slots &&
         (group.owners[slot / group.block_size] == seat.generation ||
          (seat.loads && position < seat.hit_length));
}

// Whether `position` is in the block where a hit ends that a load may have filled.
NWOR_HOST_DEVICE inline bool is_behind_hit(const AuditGroup& group, const Seat& seat,
                                           int64_t position) {
  const int64_t hit = seat.hit_length;
  return seat.loads == kUntoldLoads && hit > 0 && position >= hit &&
         position / group.block_size == (hit - 1) / group.block_size;
}

// Row i, of request r, will make its text H = `hash`.
NWOR_HOST_DEVICE inline void plan_row(const AuditPlanArgs& args, int64_t r, int64_t i,
                                      int64_t hash) {
  const AuditGroup& group = args.group;
  const int64_t seat_index = args.batch.row_seats.at(r);
  const Seat& seat = group.seats[seat_index];
  const int64_t position = args.positions[i];
  const int64_t slot = args.slot_mapping[i];
  PlanRow& row = group.plan[i];
  row = {-1, hash, position, args.tokens[i], kSlotPlanned, seat_index, 0, {}};
  if (slot < 0) {
    return;
  }
  if (!may_write(group, args.batch, r, seat, position, slot)) {
    const int64_t owner =
        slot < group.num_slots ? group.owners[slot / group.block_size] : 0;
    const int64_t expected = args.batch.slot(r, position);
    report(group, {kForeignWrite, -1, 0, slot, position, owner, seat.generation,
                   args.step, args.step, expected, slot, 0});
  }
  if (slot >= group.num_slots) {
    return;
  }
  SlotRecord& record = group.records[slot];
  row.slot = slot;
  // Before the exchange: another row that goes to this slot writes behind its own.
  row.old = record;
#ifdef __CUDA_ARCH__
  __threadfence_block();
#endif
  row.old.state = exchange(record.state, kSlotPlanned);
  if (row.old.state == kSlotPlanned) {
    // Another row of this step, or of one that failed: it has no checksums.
    row.old.state = kSlotUnknown;
    row.old.content = kContentNone;
    row.suspect = -1;
  } else if (row.old.state == kSlotLoaded || is_behind_hit(group, seat, position)) {
    row.old.content = kContentNone;  // a load fills whole blocks
  } else if (row.old.content == kContentLoaded) {
    row.old.content = kContentNone;
  }
  record = written(hash, args.tokens[i], position, args.step, seat, kSlotPlanned,
                   kContentNone);
}

// --- resolve ---------------------------------------------------------------------

NWOR_HOST_DEVICE inline int64_t num_drafts_of(const AuditResolveArgs& args, int64_t r) {
  return args.cu_num_logits == nullptr
             ? 0
             : args.cu_num_logits[r] - (r == 0 ? 0 : args.cu_num_logits[r - 1]) - 1;
}

// Behind the last row that is kept, of those up to `end`.
NWOR_HOST_DEVICE inline int64_t kept_end_of(int64_t end, int64_t num_drafts,
                                            int64_t accepted) {
  return end - most(0, num_drafts) + most(0, least(accepted, num_drafts));
}

// Row i of request r is kept, or was a draft that is rejected. is_end: the last one
// that is kept.
NWOR_HOST_DEVICE inline void keep_row(const AuditResolveArgs& args, int64_t r,
                                      int64_t i, bool is_kept, bool is_end) {
  const AuditGroup& group = args.group;
  const int64_t seat_index = args.batch.row_seats.at(r);
  Seat& seat = group.seats[seat_index];
  PlanRow& row = group.plan[i];
  row.state = is_kept ? kSlotCommitted : kSlotRejected;
  if (row.slot >= 0) {
    SlotRecord& record = group.records[row.slot];
    if (record.state != kSlotPlanned || record.hash != row.hash) {
      // Another row of this step went to the same slot.
    } else if (!is_kept && args.is_undone) {
      record = row.old;
    } else {
      record.state = seat.opaque && is_kept ? kSlotUnknown : row.state;
    }
  }
  if (is_kept && group.is_block_end(row.position) && !seat.opaque &&
      row.position / group.block_size < group.max_blocks) {
    expected_at(group, seat_index, row.position / group.block_size) = row.hash;
  }
  if (is_end) {
    seat.hash = row.hash;
    seat.length = row.position + 1;
  }
}

// This step's row i, where the table has it. Returns slots compared.
NWOR_HOST_DEVICE inline int64_t check_row(const AuditResolveArgs& args, int64_t r,
                                          int64_t i) {
  const AuditGroup& group = args.group;
  const PlanRow& row = group.plan[i];
  const int64_t slot = args.batch.slot(r, row.position);
  if (row.state != kSlotCommitted || row.slot < 0 || !is_in_cache(group, slot)) {
    return 0;
  }
  if (!holds(group.records[slot], row.hash)) {
    report_prefix(group, slot, row.position, row.hash, args.batch.row_seats.at(r),
                  args.step);
  }
  return 1;
}

// The end of block b of request r. Returns slots compared.
NWOR_HOST_DEVICE inline int64_t check_end(const AuditResolveArgs& args, int64_t r,
                                          int64_t b) {
  const AuditGroup& group = args.group;
  const int64_t seat_index = args.batch.row_seats.at(r);
  const Seat& seat = group.seats[seat_index];
  const int64_t hash = expected_at(group, seat_index, b);
  const int64_t position = (b + 1) * group.block_size - 1;
  const int64_t slot = args.batch.slot(r, position);
  const bool is_adopted_soon = seat.is_new && position < seat.hit_length;
  if (hash == 0 || is_adopted_soon || !is_in_cache(group, slot)) {
    return 0;
  }
  if (!holds(group.records[slot], hash)) {
    report_prefix(group, slot, position, hash, seat_index, args.step);
  }
  return 1;
}

// --- loads -----------------------------------------------------------------------

constexpr int64_t kNotStored = -1;
constexpr int64_t kStoreForgotten = -2;

// The kept slot that says what a load should have brought to `slot`; kNotStored: that
// is not known; kStoreForgotten: later stores took its place.
NWOR_HOST_DEVICE inline int64_t stored_slot(const AuditGroup& group, int64_t slot) {
  const int64_t number = group.stores[slot / group.block_size];
  if (number == 0) {
    return kNotStored;
  }
  const int64_t kept = group.kept_block(number);
  if (group.stores[kept] != number) {
    return kStoreForgotten;
  }
  const int64_t found = kept * group.block_size + slot % group.block_size;
  const SlotRecord& record = group.records[found];
  return record.state == kSlotCommitted && record.content == kContentKnown ? found
                                                                           : kNotStored;
}

// --- adopt -----------------------------------------------------------------------

// H in front of block b, of a seat that was just taken.
NWOR_HOST_DEVICE inline int64_t hash_before(const AuditGroup& group, int64_t seat_index,
                                            int64_t b) {
  return b == 0 ? group.seats[seat_index].seed : expected_at(group, seat_index, b - 1);
}

// Block b of a hit, whose text before it is H = `hash`.
NWOR_HOST_DEVICE inline void adopt_block(const AuditAdoptArgs& args, int64_t b,
                                         int64_t hash) {
  const AuditGroup& group = args.group;
  const int64_t seat_index = args.batch.row_seats.at(args.row);
  const Seat& seat = group.seats[seat_index];
  int64_t num_identities = 0;
  int64_t num_unverified = 0;
  bool is_reported = false;
  for (int64_t p = b * group.block_size;
       p < least((b + 1) * group.block_size, args.length); ++p) {
    hash = add(hash, identity_of(args.tokens[p], p));
    const int64_t slot = args.batch.slot(args.row, p);
    if (!is_in_cache(group, slot)) {
      continue;
    }
    ++num_identities;
    SlotRecord& record = group.records[slot];
    const int64_t stored =
        record.state == kSlotLoaded ? stored_slot(group, slot) : kNotStored;
    if (stored >= 0) {
      const bool has_old = record.content != kContentNone;
      record = group.records[stored];
      record.content = has_old ? kContentReplaced : kContentLoaded;
    } else if (stored == kStoreForgotten) {
      group.stores[slot / group.block_size] = 0;  // what follows is counted here
    }
    if (record.state == kSlotUnknown || record.state == kSlotLoaded ||
        seat.loads == kUntoldLoads) {
      ++num_unverified;
      // A token of -1: another group's block, or nobody knows whose.
      const bool is_other = record.state == kSlotLoaded &&
                            record.content != kContentNone && record.token >= 0 &&
                            record.token != args.tokens[p];
      record = written(hash, args.tokens[p], p, args.step, seat, kSlotCommitted,
                       is_other ? kContentReplaced : kContentNone);
    } else if (!holds(record, hash) && !is_reported) {
      is_reported = true;
      report_prefix(group, slot, p, hash, seat_index, args.step);
    }
  }
  count(group.header->num_identities, num_identities);
  count(group.header->num_unverified, num_unverified);
}

// --- bytes -----------------------------------------------------------------------

// A slot's checksums by layer in a table of them, those known and those found.
struct Compared {
  const int32_t* known;
  const int32_t* found;
  int64_t num_layers;
  int64_t num_same;
  int64_t first_same;
  int64_t first_other;
};

NWOR_HOST_DEVICE inline Finding other_bytes(const AuditGroup& group,
                                            const AuditBytes& bytes, int64_t slot,
                                            int64_t position, const Seat& seat,
                                            int64_t step, const Compared& compared) {
  Finding finding = at_slot(group, kChanged, slot, position, seat, step);
  finding.table = bytes.table_index;
  if (compared.num_same < compared.num_layers) {
    const int64_t layer = compared.first_other;
    finding.layer = layer;
    finding.num_layers = compared.num_layers - compared.num_same;
    finding.expected = static_cast<uint32_t>(compared.known[layer]);
    finding.found = static_cast<uint32_t>(compared.found[layer]);
  }
  return finding;
}

NWOR_HOST_DEVICE inline void report_missing(const AuditRecordArgs& args, int64_t i,
                                            int64_t layer, int64_t num_layers) {
  const AuditGroup& group = args.group;
  const PlanRow& row = group.plan[i];
  Finding finding = at_slot(group, kMissingWrite, row.slot, row.position,
                            group.seats[row.seat], args.step);
  finding.table = args.bytes.table_index;
  finding.layer = layer;
  finding.num_layers = num_layers;
  finding.expected = row.hash;
  finding.found = row.old.hash;
  report(group, finding);
}

// What row i's checksums say of it, before they are recorded.
NWOR_HOST_DEVICE inline void judge_row(const AuditRecordArgs& args, int64_t i,
                                       const Compared& compared) {
  const AuditGroup& group = args.group;
  PlanRow& row = group.plan[i];
  const Seat& seat = group.seats[row.seat];
  if (row.state == kSlotRejected) {
    if (args.is_undone && compared.num_same < compared.num_layers) {
      Finding finding = other_bytes(group, args.bytes, row.slot, row.position, seat,
                                    args.step, compared);
      finding.writer = seat.generation;
      finding.writer_step = args.step;
      report(group, finding);
    }
    return;
  }
  // Another token changes the bytes of every layer; the same one behind another prefix
  // need not (it never does in the first layer). -1 stands for a draft that the
  // scheduler placed before there were any: vLLM computes it as some token.
  if (seat.opaque || row.old.token == row.token || row.old.token < 0 ||
      compared.num_same == 0) {
    return;
  }
  // One checksum of 32 bits in billions agrees by chance: it takes a second one, of
  // another layer, or of this layer at the position before (judge_suspect).
  const bool is_sure = compared.num_same > 1;
  row.suspect = 2 * (1 + compared.first_same) + is_sure;
  count(group.header->num_suspects);
  if (is_sure) {
    report_missing(args, i, compared.first_same, compared.num_same);
  }
}

// Row i, when all rows were judged.
NWOR_HOST_DEVICE inline void judge_suspect(const AuditRecordArgs& args, int64_t i) {
  const AuditGroup& group = args.group;
  const PlanRow& row = group.plan[i];
  if (i == 0 || row.suspect <= 0 || row.suspect % 2 == 1) {
    return;
  }
  const PlanRow& previous = group.plan[i - 1];
  if (previous.seat == row.seat && previous.suspect / 2 == row.suspect / 2) {
    report_missing(args, i, row.suspect / 2 - 1, 1);
  }
}

// Whether a snapshot takes the slot's checksums: of one that no step has written, or
// was to. again: and that has those of the snapshot before, because its block has not
// been another group's meanwhile.
NWOR_HOST_DEVICE inline bool is_taken(const SlotRecord& record, bool again) {
  return record.step == 0 && (!again || record.content != kContentNone);
}

// Whether a slot is one whose bytes scan looks at.
NWOR_HOST_DEVICE inline bool has_bytes(const SlotRecord& record) {
  return record.state == kSlotCommitted || record.state == kSlotUnknown;
}

// Whether a load brought what a slot holds, and nobody looked at it yet.
NWOR_HOST_DEVICE inline bool is_fresh(int32_t content) {
  return content == kContentReplaced || content == kContentLoaded;
}

// What a slot's checksums say of it. content: of its record. stored: what is_fresh was
// compared with, or why it was not (stored_slot).
struct Stored {
  int64_t slot;
  Compared compared;
};
NWOR_HOST_DEVICE inline void judge_slot(const AuditScanArgs& args, int64_t seat_index,
                                        int64_t slot, int64_t position, int32_t content,
                                        const Compared& compared,
                                        const Stored& stored) {
  const AuditGroup& group = args.group;
  const Seat& seat = group.seats[seat_index];
  const bool is_same = compared.num_same == compared.num_layers;
  if (!is_fresh(content)) {
    // What has no checksums yet was taken over: it gets some.
    if (content != kContentNone && !is_same) {
      report(group,
             other_bytes(group, args.bytes, slot, position, seat, args.step, compared));
    }
    return;
  }
  if (stored.slot == kStoreForgotten) {
    count(group.header->num_unverified, args.is_last);
    return;
  }
  if (stored.slot >= 0) {
    count(group.header->num_returned, args.is_last);
    if (stored.compared.num_same == stored.compared.num_layers) {
      return;
    }
  }
  // A single layer's checksum may agree by chance.
  const bool is_sure = compared.num_layers > 1 || stored.slot >= 0;
  if (content == kContentReplaced && is_same && is_sure) {
    Finding finding =
        other_bytes(group, args.bytes, slot, position, seat, args.step, compared);
    finding.kind = kNeverLoaded;
    finding.layer = 0;
    finding.num_layers = compared.num_layers;
    finding.expected = group.records[slot].hash;
    report(group, finding);
  } else if (stored.slot >= 0) {
    Finding finding = other_bytes(group, args.bytes, slot, position, seat, args.step,
                                  stored.compared);
    finding.kind = kHandedOn;
    report(group, finding);
  }
}

// --- blocks ----------------------------------------------------------------------

// number: of the store that a load brings, if `fills`.
NWOR_HOST_DEVICE inline void hand_on_block(const AuditGroup& group, int64_t block,
                                           int64_t number, int64_t step, bool fills) {
  SlotRecord* records = group.records + block * group.block_size;
  if (fills) {
    group.stores[block] = number;
    for (int64_t o = 0; o < group.block_size; ++o) {
      records[o].state = kSlotLoaded;
    }
    return;
  }
  for (int64_t o = block == 0 ? group.block_size : 0; o < group.block_size; ++o) {
    if (records[o].state == kSlotUnknown) {
      return;
    }
    // Each slot's H follows from the one before, or it is of another text.
    const bool is_next =
        o == 0 || records[o].hash ==
                      add(records[o - 1].hash,
                          identity_of(records[o].token, records[o - 1].position + 1));
    count(group.header->num_identities);
    if (records[o].state == kSlotCommitted && is_next) {
      continue;
    }
    Seat seat{};
    seat.generation = group.owners[block];
    const int64_t position = o == 0 ? records[o].position : records[0].position + o;
    Finding finding =
        at_slot(group, kHandedOn, block * group.block_size + o, position, seat, step);
    finding.expected = kSlotCommitted;
    finding.found = records[o].state;
    report(group, finding);
    return;
  }
}

NWOR_HOST_DEVICE inline void hand_out_block(const AuditGroup& group, int64_t block,
                                            int32_t generation) {
  group.owners[block] = generation;
  if (generation != 0) {
    return;
  }
  for (int64_t o = 0; o < group.block_size; ++o) {
    SlotRecord& record = group.records[block * group.block_size + o];
    record = {0, -1, 0, record.step, record.generation, kSlotNever, kContentNone};
  }
}

// --- publish ---------------------------------------------------------------------

NWOR_HOST_DEVICE inline int64_t num_to_publish(const AuditGroup& group) {
  return least(group.header->num_findings - group.header->num_published,
               group.capacity);
}

NWOR_HOST_DEVICE inline void end_step(const AuditPublishArgs& args) {
  FindingsHeader* const header = args.group.header;
  *args.header_to = *header;
  header->num_published = header->num_findings;
  header->cursor = header->next_cursor;
}

}  // namespace nwor
