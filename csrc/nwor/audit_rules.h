// SPDX-License-Identifier: Apache-2.0
//
// What the audit does with one row, slot or block; who loops over them is in
// audit_passes.h.
//
// Many threads are here at once. What two of them may touch is counted or exchanged by
// atomics: the header, a record's state in plan (of the rows that go to one slot one
// gets what the slot held), a record's content in scan (requests share blocks).
// Everything else belongs to one thread of a launch, and launches follow each other.
#pragma once

#include "audit.h"

#ifdef __CUDACC__
#define NWOR_RULE __device__ inline
#else
#define NWOR_RULE inline
#endif

namespace nwor {

NWOR_RULE uint64_t mix64(uint64_t value) {
  // splitmix64's finaliser.
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31);
}

// What token `token` at `position` adds to H.
NWOR_RULE int64_t identity_of(int64_t token, int64_t position) {
  return static_cast<int64_t>(
      mix64(static_cast<uint64_t>(token) * 0x9E3779B97F4A7C15ULL +
            mix64(static_cast<uint64_t>(position) + 1)));
}

// Both wrap around.
NWOR_RULE int64_t add(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
NWOR_RULE int64_t subtract(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}

// What word number `index` of a slot, 8 bytes, adds to its checksum in a layer.
NWOR_RULE uint32_t checksum_of(uint64_t word, int64_t index) {
  return static_cast<uint32_t>(
      mix64(word + static_cast<uint64_t>(index + 1) * 0x9E3779B97F4A7C15ULL) >> 32);
}

// `by` more, and what it was.
NWOR_RULE int64_t count(int64_t& counter, int64_t by = 1) {
#ifdef __CUDACC__
  return static_cast<int64_t>(atomicAdd(reinterpret_cast<unsigned long long*>(&counter),
                                        static_cast<unsigned long long>(by)));
#else
  return __atomic_fetch_add(&counter, by, __ATOMIC_RELAXED);
#endif
}

// `value` instead, and what it was.
NWOR_RULE int32_t exchange(int32_t& place, int32_t value) {
#ifdef __CUDACC__
  return atomicExch(&place, value);
#else
  return __atomic_exchange_n(&place, value, __ATOMIC_SEQ_CST);
#endif
}

// A slot's content while a team compares it, and afterwards; what it was.
NWOR_RULE int32_t claim(SlotRecord& record) {
  const int32_t content = exchange(record.content, kContentClaimed);
#ifdef __CUDACC__
  __threadfence();
#endif
  return content;
}
NWOR_RULE void release(SlotRecord& record, int32_t content) {
#ifdef __CUDACC__
  __threadfence();
#endif
  exchange(record.content, content);
}

NWOR_RULE int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

NWOR_RULE void report(const AuditGroup& group, const Finding& finding) {
  const int64_t number =
      count(group.header->num_findings) - group.header->num_published;
  if (number < group.capacity) {
    reinterpret_cast<Finding*>(group.header)[1 + number] = finding;
  }
}

// What is found at `slot`, which belongs to `seat`.
NWOR_RULE Finding at_slot(const AuditGroup& group, FindingClass kind, int64_t slot,
                          int64_t position, const Seat& seat, int64_t step) {
  const SlotRecord& record = group.records[slot];
  return {step, kind, seat.generation,   position,    slot,
          -1,   0,    record.generation, record.step, 0,
          0};
}

// Of a write of `token` by `seat`, which makes its text H = `hash`.
NWOR_RULE SlotRecord written(int64_t hash, int32_t token, int64_t position,
                             int64_t step, const Seat& seat, SlotState state,
                             SlotContent content) {
  return {hash,
          token,
          static_cast<int32_t>(position),
          static_cast<int32_t>(step),
          static_cast<int32_t>(seat.generation),
          state,
          content};
}

// Compares what a slot is said to hold with H = `hash`.
NWOR_RULE bool holds(const SlotRecord& record, int64_t hash) {
  return record.state == kSlotUnknown ||
         (record.state == kSlotCommitted && record.hash == hash);
}

NWOR_RULE void report_prefix(const AuditGroup& group, int64_t slot, int64_t position,
                             int64_t hash, int64_t seat_index, int64_t step) {
  Finding finding =
      at_slot(group, kWrongPrefix, slot, position, group.seats[seat_index], step);
  finding.expected = hash;
  finding.found =
      group.records[slot].state == kSlotCommitted ? group.records[slot].hash : 0;
  report(group, finding);
  // Once for a block: its end is not looked at any more.
  if (position / group.block_size < group.max_blocks) {
    group.expected_at(seat_index, position / group.block_size) = 0;
  }
}

// --- plan ------------------------------------------------------------------------

// H in front of `start`, where the request goes on. Behind a load that failed it
// goes back to a block's begin; from anywhere else its text is not known any more.
NWOR_RULE int64_t base_of(const AuditGroup& group, int64_t seat_index, int64_t start) {
  Seat& seat = group.seats[seat_index];
  int64_t hash = seat.seed;
  if (start == seat.length) {
    hash = seat.hash;
  } else if (start != 0) {
    const bool is_back = start < seat.length && group.is_block_end(start - 1) &&
                         start / group.block_size <= group.max_blocks;
    const int64_t known =
        is_back ? group.expected_at(seat_index, start / group.block_size - 1) : 0;
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
NWOR_RULE bool may_write(const AuditStep& args, int64_t r, const Seat& seat,
                         int64_t position, int64_t slot) {
  const AuditGroup& group = args.group;
  return slot == args.slot(r, position) && slot < group.num_slots() &&
         (group.owners[slot / group.block_size] == seat.generation ||
          (seat.loads && position < seat.hit_length));
}

// Whether `position` is in the block where a hit ends that a load may have filled.
NWOR_RULE bool is_behind_hit(const AuditGroup& group, const Seat& seat,
                             int64_t position) {
  const int64_t hit = seat.hit_length;
  return seat.loads == kUnknownLoads && hit > 0 && position >= hit &&
         position / group.block_size == (hit - 1) / group.block_size;
}

// Row i, of request r, will make its text H = `hash`.
NWOR_RULE void plan_row(const AuditPlanArgs& args, int64_t r, int64_t i, int64_t hash) {
  const AuditGroup& group = args.group;
  const int64_t seat_index = args.batch.row_seats.at(r);
  const Seat& seat = group.seats[seat_index];
  const int64_t position = args.positions[i];
  const int64_t slot = args.slot_mapping[i];
  PlanRow& row = group.plan[i];
  row = {-1, hash, position, args.tokens[i], kSlotPlanned, seat_index, 0, 0, {}};
  if (slot < 0) {
    return;
  }
  if (!may_write(args, r, seat, position, slot)) {
    const int64_t owner =
        slot < group.num_slots() ? group.owners[slot / group.block_size] : 0;
    const int64_t expected = args.slot(r, position);
    report(group, {args.step, kForeignWrite, owner, position, slot, -1, 0,
                   seat.generation, args.step, expected, slot});
  }
  if (slot >= group.num_slots()) {
    return;
  }
  SlotRecord& record = group.records[slot];
  row.slot = slot;
  // Before the exchange: another row that goes to this slot writes behind its own.
  row.old = record;
#ifdef __CUDACC__
  __threadfence();
#endif
  row.old.state = exchange(record.state, kSlotPlanned);
  if (row.old.state == kSlotPlanned) {
    // Another row of this step, or of one that failed: it has no checksums.
    row.old.state = kSlotUnknown;
    row.old.content = kContentNone;
    row.num_same = -1;
  } else if (row.old.state == kSlotLoaded || is_behind_hit(group, seat, position)) {
    row.old.content = kContentNone;  // a load fills whole blocks
  } else if (row.old.content == kContentLoaded) {
    row.old.content = kContentNone;
  }
  record = written(hash, args.tokens[i], position, args.step, seat, kSlotPlanned,
                   kContentNone);
}

// --- resolve ---------------------------------------------------------------------

NWOR_RULE int64_t num_drafts_of(const AuditResolveArgs& args, int64_t r) {
  return args.cu_num_logits == nullptr
             ? 0
             : args.cu_num_logits[r] - (r == 0 ? 0 : args.cu_num_logits[r - 1]) - 1;
}

// Behind the last row that is kept, of those up to `end`.
NWOR_RULE int64_t kept_end_of(int64_t end, int64_t num_drafts, int64_t accepted) {
  const int64_t num_kept = least(accepted, num_drafts);
  return end - (num_drafts > 0 ? num_drafts : 0) + (num_kept > 0 ? num_kept : 0);
}

// Row i of request r is kept, or was a draft that is rejected. is_end: the last one
// that is kept.
NWOR_RULE void keep_row(const AuditResolveArgs& args, int64_t r, int64_t i,
                        bool is_kept, bool is_end) {
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
    group.expected_at(seat_index, row.position / group.block_size) = row.hash;
  }
  if (is_end) {
    seat.hash = row.hash;
    seat.length = row.position + 1;
  }
}

// This step's row i, where the table has it. Returns slots compared.
NWOR_RULE int64_t check_row(const AuditResolveArgs& args, int64_t r, int64_t i) {
  const AuditGroup& group = args.group;
  const PlanRow& row = group.plan[i];
  const int64_t slot = args.slot(r, row.position);
  if (row.state != kSlotCommitted || row.slot < 0 || !group.is_in_cache(slot)) {
    return 0;
  }
  if (!holds(group.records[slot], row.hash)) {
    report_prefix(group, slot, row.position, row.hash, args.batch.row_seats.at(r),
                  args.step);
  }
  return 1;
}

// The end of block b of request r. Returns slots compared.
NWOR_RULE int64_t check_end(const AuditResolveArgs& args, int64_t r, int64_t b) {
  const AuditGroup& group = args.group;
  const int64_t seat_index = args.batch.row_seats.at(r);
  const Seat& seat = group.seats[seat_index];
  const int64_t hash = group.expected_at(seat_index, b);
  const int64_t position = (b + 1) * group.block_size - 1;
  const int64_t slot = args.slot(r, position);
  const bool is_adopted_soon = seat.is_new && position < seat.hit_length;
  if (hash == 0 || is_adopted_soon || !group.is_in_cache(slot)) {
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
NWOR_RULE int64_t stored_slot(const AuditGroup& group, int64_t slot) {
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
NWOR_RULE int64_t hash_before(const AuditGroup& group, int64_t seat_index, int64_t b) {
  return b == 0 ? group.seats[seat_index].seed : group.expected_at(seat_index, b - 1);
}

// Block b of a hit, whose text before it is H = `hash`.
NWOR_RULE void adopt_block(const AuditStep& args, const AuditHit& hit, int64_t b,
                           int64_t hash) {
  const AuditGroup& group = args.group;
  const int64_t seat_index = args.batch.row_seats.at(hit.row);
  const Seat& seat = group.seats[seat_index];
  int64_t num_identities = 0;
  int64_t num_unverified = 0;
  bool is_reported = false;
  for (int64_t p = b * group.block_size;
       p < least((b + 1) * group.block_size, hit.length); ++p) {
    hash = add(hash, identity_of(hit.tokens[p], p));
    const int64_t slot = args.slot(hit.row, p);
    if (!group.is_in_cache(slot)) {
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
        seat.loads == kUnknownLoads) {
      ++num_unverified;
      // A token of -1: another group's block, or nobody knows whose.
      const bool is_other = record.state == kSlotLoaded &&
                            record.content != kContentNone && record.token >= 0 &&
                            record.token != hit.tokens[p];
      record = written(hash, hit.tokens[p], p, args.step, seat, kSlotCommitted,
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

NWOR_RULE Finding other_bytes(const AuditGroup& group, const AuditPart& part,
                              int64_t slot, int64_t position, const Seat& seat,
                              int64_t step, const Compared& compared) {
  Finding finding = at_slot(group, kChanged, slot, position, seat, step);
  if (compared.num_same < compared.num_layers) {
    const int64_t layer = compared.first_other;
    finding.layer = part.first_column + layer;
    finding.num_layers = compared.num_layers - compared.num_same;
    finding.expected = static_cast<uint32_t>(compared.known[layer]);
    finding.found = static_cast<uint32_t>(compared.found[layer]);
  }
  return finding;
}

// What row i's checksums in a part say of it, before they are recorded.
NWOR_RULE void judge_row(const AuditResolveArgs& args, const AuditPart& part, int64_t i,
                         const Compared& compared) {
  const AuditGroup& group = args.group;
  PlanRow& row = group.plan[i];
  const Seat& seat = group.seats[row.seat];
  if (row.state == kSlotRejected) {
    if (args.is_undone && compared.num_same < compared.num_layers) {
      Finding finding =
          other_bytes(group, part, row.slot, row.position, seat, args.step, compared);
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
  if (row.num_same == 0) {
    row.first_same = static_cast<int32_t>(part.first_column + compared.first_same);
    count(group.header->num_suspects);
  }
  row.num_same += static_cast<int32_t>(compared.num_same);
}

// Row i, when all rows were judged. One checksum of 32 bits in billions agrees by
// chance: it takes a second one, of another layer, or of this layer at the position
// before.
NWOR_RULE void judge_suspect(const AuditResolveArgs& args, int64_t i) {
  const AuditGroup& group = args.group;
  const PlanRow& row = group.plan[i];
  if (row.num_same <= 0) {
    return;
  }
  bool is_sure = row.num_same > 1;
  if (!is_sure && i > 0) {
    const PlanRow& previous = group.plan[i - 1];
    is_sure = previous.seat == row.seat && previous.num_same > 0 &&
              previous.first_same == row.first_same;
  }
  if (is_sure) {
    const Seat& seat = group.seats[row.seat];
    report(group, {args.step, kMissingWrite, seat.generation, row.position, row.slot,
                   row.first_same, row.num_same, seat.generation, args.step, row.hash,
                   row.old.hash});
  }
}

// Whether a snapshot takes the slot's checksums: of one that no step has written, or
// was to. again: and that has those of the snapshot before, because its block has not
// been another group's meanwhile.
NWOR_RULE bool is_taken(const SlotRecord& record, bool again) {
  return record.step == 0 && (!again || record.content != kContentNone);
}

// Whether a slot is one whose bytes scan looks at.
NWOR_RULE bool has_bytes(const SlotRecord& record) {
  return record.state == kSlotCommitted || record.state == kSlotUnknown;
}

// Whether a load brought what a slot holds, and nobody looked at it yet.
NWOR_RULE bool is_fresh(int32_t content) {
  return content == kContentReplaced || content == kContentLoaded;
}

// What a slot's checksums say of it. content: of its record. stored: what is_fresh was
// compared with, or why it was not (stored_slot).
struct Stored {
  int64_t slot;
  Compared compared;
};
NWOR_RULE void judge_slot(const AuditResolveArgs& args, const AuditPart& part,
                          int64_t seat_index, int64_t slot, int64_t position,
                          int32_t content, const Compared& compared,
                          const Stored& stored) {
  const AuditGroup& group = args.group;
  const Seat& seat = group.seats[seat_index];
  const bool is_same = compared.num_same == compared.num_layers;
  if (!is_fresh(content)) {
    // What has no checksums yet was taken over: it gets some.
    if (content != kContentNone && !is_same) {
      report(group,
             other_bytes(group, part, slot, position, seat, args.step, compared));
    }
    return;
  }
  if (stored.slot == kStoreForgotten) {
    count(group.header->num_unverified, part.is_last);
    return;
  }
  if (stored.slot >= 0) {
    count(group.header->num_returned, part.is_last);
    if (stored.compared.num_same == stored.compared.num_layers) {
      return;
    }
  }
  // A single layer's checksum may agree by chance.
  const bool is_sure = compared.num_layers > 1 || stored.slot >= 0;
  if (content == kContentReplaced && is_same && is_sure) {
    Finding finding =
        other_bytes(group, part, slot, position, seat, args.step, compared);
    finding.kind = kNeverLoaded;
    finding.layer = part.first_column;
    finding.num_layers = compared.num_layers;
    finding.expected = group.records[slot].hash;
    report(group, finding);
  } else if (stored.slot >= 0) {
    Finding finding =
        other_bytes(group, part, slot, position, seat, args.step, stored.compared);
    finding.kind = kHandedOn;
    report(group, finding);
  }
}

// --- blocks ----------------------------------------------------------------------

// Each slot of a block that is stored must be committed, and its H follow from the one
// before, or it is of another text.
NWOR_RULE void check_stored(const AuditGroup& group, int64_t block, int64_t step) {
  const SlotRecord* records = group.records + block * group.block_size;
  for (int64_t o = block == 0 ? group.block_size : 0; o < group.block_size; ++o) {
    if (records[o].state == kSlotUnknown) {
      return;
    }
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

}  // namespace nwor
