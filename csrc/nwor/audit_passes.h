// SPDX-License-Identifier: Apache-2.0
//
// How the rules of audit_rules.h are applied to requests, slots and blocks, and in
// which order: the same on the CPU and on CUDA.
//
// A pass is called by teams of threads, which share out what there is to do; all
// threads of a team call it. A team is a thread block on CUDA (audit_cuda.cu, `Block`),
// one thread on the CPU (audit_cpu.cpp, `Solo`). It has
//
//   share(count)         the items that are this team's: Share
//   index(), size()      of this thread, and of the team
//   sync()               what the team's threads wrote is seen by all of them
//   sum(value)           up to this thread, and of all
//   of_first(value)      the first thread's; a sync lies between two calls
//   load(address)        a value that other teams may have written
//   room(count)          for as many int64, of the team
//   num_accepted(...)    of window.h
//   checksums(...)       of a slot in a part's layers; ends with a sync
//
// and of its warps is_first_warp(), is_last_warp(), lane(), num_lanes(), and for all
// lanes of one: warp_sum(value), up to this lane; count_lanes(is); first_lane(is), -1
// if it is none; of_last_lane(value).
//
// Values that come from the device are not trusted: a request whose seat or rows are
// out of range is left alone.
#pragma once

#include "audit_rules.h"

namespace nwor {

// for (auto [i, end, stride] = team.share(count); i < end; i += stride)
struct Share {
  int64_t i;
  int64_t end;
  int64_t stride;
};

// The sum up to a thread, this one included, and of all.
struct TeamSum {
  int64_t inclusive;
  int64_t total;
};

// --- requests --------------------------------------------------------------------

// The rows of a request. No rows where what the device says makes no sense.
struct Rows {
  int64_t begin;
  int64_t end;
  bool is_valid;
};
NWOR_RULE Rows rows_of(const AuditStep& args, int64_t r) {
  const AuditBatch& batch = args.batch;
  const int64_t seat = batch.row_seats.at(r);
  const Rows rows{batch.query_start_loc[r], batch.query_start_loc[r + 1], true};
  const bool is_valid = seat >= 0 && seat < args.group.num_seats && rows.begin >= 0 &&
                        rows.begin <= rows.end && rows.end <= args.num_tokens;
  return is_valid ? rows : Rows{0, 0, false};
}

// A request comes into the batch.
struct SeatRequest : AuditSeatArgs {
  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    const int64_t length = fresh.hit_length;
    int64_t hash = fresh.seed;
    for (int64_t first = 0; first < length; first += team.size()) {
      const int64_t p = first + team.index();
      const TeamSum sum = team.sum(p < length ? identity_of(tokens[p], p) : 0);
      if (p < length && group.is_block_end(p)) {
        group.expected_at(seat, p / group.block_size) = add(hash, sum.inclusive);
      }
      hash = add(hash, sum.total);
    }
    for (int64_t b = length / group.block_size + team.index(); b < group.max_blocks;
         b += team.size()) {
      group.expected_at(seat, b) = 0;
    }
    if (team.index() == 0) {
      group.seats[seat] = fresh;
      group.seats[seat].hash = hash;
      group.seats[seat].length = length;
    }
  }
};

struct PlanRequests : AuditPlanArgs {
  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    for (auto [r, end, stride] = team.share(batch.num_reqs); r < end; r += stride) {
      const Rows rows = rows_of(*this, r);
      if (rows.begin < rows.end) {
        plan(team, r, rows);
      }
    }
  }

  template <typename Team>
  NWOR_RULE void plan(Team& team, int64_t r, const Rows& rows) const {
    const int64_t seat_index = batch.row_seats.at(r);
    int64_t hash = team.of_first(
        team.index() == 0 ? base_of(group, seat_index, positions[rows.begin]) : 0);
    for (int64_t first = rows.begin; first < rows.end; first += team.size()) {
      const int64_t i = first + team.index();
      const TeamSum sum =
          team.sum(i < rows.end ? identity_of(tokens[i], positions[i]) : 0);
      if (i < rows.end) {
        plan_row(*this, r, i, add(hash, sum.inclusive));
      }
      hash = add(hash, sum.total);
    }
  }
};

// What is kept, of all requests, before any is checked: one may have found another's
// block in this step.
struct KeepRequests : AuditResolveArgs {
  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    for (auto [r, end, stride] = team.share(batch.num_reqs); r < end; r += stride) {
      const Rows rows = rows_of(*this, r);
      const int64_t num_drafts = num_drafts_of(*this, r);
      const int64_t accepted =
          num_drafts > 0 ? team.num_accepted(acceptance, r, num_drafts) : 0;
      const int64_t kept_end = kept_end_of(rows.end, num_drafts, accepted);
      for (int64_t i = rows.begin + team.index(); i < rows.end; i += team.size()) {
        keep_row(*this, r, i, i < kept_end, i == kept_end - 1);
      }
      team.sync();
    }
  }
};

// Whether the requests' tables lead to what they wrote and have written.
struct CheckRequests : AuditResolveArgs {
  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    for (auto [r, end, stride] = team.share(batch.num_reqs); r < end; r += stride) {
      const Rows rows = rows_of(*this, r);
      if (rows.is_valid && !group.seats[batch.row_seats.at(r)].opaque) {
        check(team, r, rows);
      }
    }
  }

  template <typename Team>
  NWOR_RULE void check(Team& team, int64_t r, const Rows& rows) const {
    const int64_t length = group.seats[batch.row_seats.at(r)].length;
    int64_t num_compared = 0;
    for (int64_t i = rows.begin + team.index(); i < rows.end; i += team.size()) {
      num_compared += check_row(*this, r, i);
    }
    team.sync();  // a row that is reported takes its block's end off
    const int64_t end = least(length / group.block_size, group.max_blocks);
    for (int64_t b = group.first_block(length) + team.index(); b < end;
         b += team.size()) {
      num_compared += check_end(*this, r, b);
    }
    const int64_t total = team.sum(num_compared).total;
    if (team.index() == 0) {
      count(group.header->num_identities, total);
    }
  }
};

struct AdoptHit : AuditResolveArgs {
  AuditHit hit;

  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    const int64_t seat_index = batch.row_seats.at(hit.row);
    if (seat_index < 0 || seat_index >= group.num_seats) {
      return;
    }
    Seat& seat = group.seats[seat_index];
    if (team.index() == 0) {
      seat.is_new = 0;
    }
    if (seat.opaque) {
      return;
    }
    const int64_t end = group.last_block(hit.length);
    const int64_t begin = group.first_block(hit.length);
    int64_t b = begin + team.index();
    int64_t hash = b < end ? hash_before(group, seat_index, b) : 0;
    for (int64_t first = begin; first < end; first += team.size()) {
      // A block that is reported is not known to the next any more.
      const int64_t next = b + team.size();
      const int64_t hash_of_next =
          next < end ? hash_before(group, seat_index, next) : 0;
      team.sync();
      if (b < end) {
        adopt_block(*this, hit, b, hash);
      }
      b = next;
      hash = hash_of_next;
    }
  }
};

// --- bytes -----------------------------------------------------------------------

// By a warp; all lanes get it.
template <typename Team>
NWOR_RULE Compared compare(Team& team, const int32_t* known, const int32_t* found,
                           int64_t num_layers) {
  Compared compared{known, found, num_layers, 0, -1, -1};
  for (int64_t first = 0; first < num_layers; first += team.num_lanes()) {
    const int64_t i = first + team.lane();
    const bool is_layer = i < num_layers;
    const bool is_same = is_layer && team.load(known + i) == found[i];
    const int64_t same = team.first_lane(is_same);
    const int64_t other = team.first_lane(is_layer && !is_same);
    compared.num_same += team.count_lanes(is_same);
    if (compared.first_same < 0 && same >= 0) {
      compared.first_same = first + same;
    }
    if (compared.first_other < 0 && other >= 0) {
      compared.first_other = first + other;
    }
  }
  return compared;
}

// A slot's checksums become what is known of it.
template <typename Team>
NWOR_RULE void keep_checksums(Team& team, const AuditGroup& group,
                              const AuditPart& part, int64_t slot,
                              const int32_t* found) {
  int32_t* const known = part.known(group, slot);
  for (int64_t i = team.index(); i < part.table.num_layers; i += team.size()) {
    known[i] = found[i];
  }
}

// What was written, once it is known what is kept.
struct RecordRows : AuditResolveArgs {
  AuditPart part;

  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    for (auto [i, end, stride] = team.share(num_tokens); i < end; i += stride) {
      const PlanRow& row = group.plan[i];
      if (row.slot >= 0 && row.slot < group.num_slots() && row.num_same >= 0) {
        record(team, i, row.slot, row.old.content != kContentNone);
      }
    }
  }

  template <typename Team>
  NWOR_RULE void record(Team& team, int64_t i, int64_t slot, bool is_judged) const {
    const int32_t* const found = team.checksums(part, slot);
    if (is_judged && team.is_first_warp()) {
      const Compared compared =
          compare(team, part.known(group, slot), found, part.table.num_layers);
      if (team.index() == 0) {
        judge_row(*this, part, i, compared);
      }
    }
    team.sync();
    keep_checksums(team, group, part, slot, found);
    if (part.is_last && team.index() == 0) {
      group.records[slot].content = kContentKnown;
    }
    team.sync();  // before the next row's checksums
  }
};

// Whose bytes a scan compares: of one row its hit; with row -1 of all rows, from the
// cursor on.
struct ScanSlots : AuditResolveArgs {
  AuditPart part;
  int64_t row;
  int64_t max_blocks;

  // The blocks of the rows, side by side, and which of them are looked at: `count` from
  // `start` on and around.
  struct Places {
    const int64_t* ends;  // [num_rows]: blocks of the rows up to each, it included
    int64_t total;
    int64_t start;
    int64_t count;
  };

  template <typename Team>
  NWOR_RULE Places places(Team& team) const {
    const int64_t num_rows = row < 0 ? batch.num_reqs : 1;
    int64_t* const ends = team.room(num_rows);
    int64_t total = 0;
    for (int64_t first = 0; first < num_rows; first += team.size()) {
      const int64_t i = first + team.index();
      const TeamSum sum = team.sum(i < num_rows ? blocks_of(i).count : 0);
      if (i < num_rows) {
        ends[i] = total + sum.inclusive;
      }
      total += sum.total;
    }
    team.sync();
    return {ends, total, row < 0 ? group.header->cursor : 0, least(max_blocks, total)};
  }

  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    const Places all = places(team);
    auto [n, end, stride] = team.share(all.count * group.block_size);
    if (n == 0 && n < end && team.index() == 0 && row < 0 && all.total > 0) {
      group.header->next_cursor = (all.start + all.count) % all.total;
    }
    for (; n < end; n += stride) {
      scan(team, all, (all.start + n / group.block_size) % all.total,
           n % group.block_size);
    }
  }

 private:
  struct RowBlocks {
    int64_t first;
    int64_t count;
  };
  NWOR_RULE RowBlocks blocks_of(int64_t i) const {
    const int64_t seat_index = batch.row_seats.at(row < 0 ? i : row);
    if (seat_index < 0 || seat_index >= group.num_seats) {
      return {0, 0};
    }
    const Seat& seat = group.seats[seat_index];
    const int64_t length = row < 0 ? seat.length : seat.hit_length;
    const int64_t first = group.first_block(length);
    const int64_t end = group.last_block(length);
    return {first, end > first ? end - first : 0};
  }

  // Offset o of place n.
  template <typename Team>
  NWOR_RULE void scan(Team& team, const Places& all, int64_t n, int64_t o) const {
    // The row: the first that ends behind n.
    int64_t low = 0;
    for (int64_t high = (row < 0 ? batch.num_reqs : 1) - 1; low < high;) {
      const int64_t middle = (low + high) / 2;
      if (all.ends[middle] > n) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    const int64_t r = row < 0 ? low : row;
    const int64_t b = blocks_of(low).first + n - (low == 0 ? 0 : all.ends[low - 1]);
    const int64_t length = group.seats[batch.row_seats.at(r)].length;
    if (o == 0 && part.is_last && team.is_last_warp() &&
        (b + 1) * group.block_size <= length) {
      check_block(team, r, b);
    }
    const int64_t position = b * group.block_size + o;
    const int64_t slot = position < length ? this->slot(r, position) : -1;
    if (group.is_in_cache(slot) && has_bytes(group.records[slot])) {
      check_bytes(team, r, position, slot);
    }
  }

  // By a warp: compares the slots of a full block from its end back, a record's own
  // token leading from its H to the one before, up to the first that is wrong or not
  // known.
  template <typename Team>
  NWOR_RULE void check_block(Team& team, int64_t r, int64_t b) const {
    const int64_t seat_index = batch.row_seats.at(r);
    int64_t hash = group.expected_at(seat_index, b);
    if (hash == 0 || group.seats[seat_index].opaque) {
      return;
    }
    const int64_t begin = b * group.block_size;
    for (int64_t last = begin + group.block_size - 1; last >= begin;
         last -= team.num_lanes()) {
      const int64_t p = last - team.lane();
      const int64_t slot = p >= begin ? this->slot(r, p) : -1;
      const bool is_known = group.is_in_cache(slot);
      SlotRecord record{};
      if (is_known) {
        record = group.records[slot];
      }
      const int64_t own = is_known ? identity_of(record.token, p) : 0;
      const int64_t through = team.warp_sum(own);
      const int64_t here = subtract(hash, subtract(through, own));
      const bool ends = !is_known || record.state == kSlotUnknown;
      const bool is_wrong = !ends && !holds(record, here);
      const int64_t stop = team.first_lane(ends || is_wrong);
      if (stop >= 0) {
        if (is_wrong && team.lane() == stop) {
          report_prefix(group, slot, p, here, seat_index, step);
        }
        return;
      }
      hash = subtract(hash, team.of_last_lane(through));
    }
  }

  template <typename Team>
  NWOR_RULE void check_bytes(Team& team, int64_t r, int64_t position,
                             int64_t slot) const {
    SlotRecord& record = group.records[slot];
    // Of the requests that share the slot, one compares it.
    const auto content =
        static_cast<int32_t>(team.of_first(team.index() == 0 ? claim(record) : 0));
    if (content != kContentClaimed) {
      const int32_t* const found = team.checksums(part, slot);
      if (team.is_first_warp()) {
        const int64_t num_layers = part.table.num_layers;
        const Compared compared =
            compare(team, part.known(group, slot), found, num_layers);
        Stored stored{is_fresh(content) ? stored_slot(group, slot) : kNotStored, {}};
        if (stored.slot >= 0) {
          stored.compared =
              compare(team, part.known(group, stored.slot), found, num_layers);
        }
        if (team.index() == 0) {
          judge_slot(*this, part, batch.row_seats.at(r), slot, position, content,
                     compared, stored);
          count(group.header->num_contents, part.is_last && content == kContentKnown);
        }
      }
      team.sync();
      keep_checksums(team, group, part, slot, found);
      team.sync();
      if (team.index() == 0) {
        release(record, part.is_last ? int32_t{kContentKnown} : content);
      }
    }
    team.sync();  // before the next slot's content and checksums
  }
};

struct SnapshotSlots : AuditSnapshotArgs {
  AuditPart part;

  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    for (auto [slot, end, stride] = team.share(group.num_slots()); slot < end;
         slot += stride) {
      if (is_taken(group.records[slot], again)) {
        keep_checksums(team, group, part, slot, team.checksums(part, slot));
        if (team.index() == 0) {
          group.records[slot].content = kContentKnown;
        }
      }
      team.sync();
    }
  }
};

// --- blocks ----------------------------------------------------------------------

// What becomes of some blocks. Their numbers, which the host has, travel with the call.
struct BlockEvents {
  static constexpr int64_t kMaxCount = 256;

  AuditGroup group;
  BlockEvent event;
  int64_t step;
  int64_t num_blocks;
  int64_t values[kMaxCount];
  int32_t blocks[kMaxCount];

  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    for (auto [i, end, stride] = team.share(num_blocks); i < end; i += stride) {
      const int64_t block = blocks[i];
      const int64_t value = values[i];
      if (event == kGiven) {
        give(team, block, static_cast<int32_t>(value));
      } else if (event == kFilled) {
        fill(team, block, value);
      } else {
        store(team, block, value);
      }
    }
  }

  template <typename Team>
  NWOR_RULE void give(Team& team, int64_t block, int32_t generation) const {
    if (team.index() == 0) {
      group.owners[block] = generation;
    }
    if (generation != 0) {
      return;
    }
    for (int64_t o = team.index(); o < group.block_size; o += team.size()) {
      SlotRecord& record = group.records[block * group.block_size + o];
      record = {0, -1, 0, record.step, record.generation, kSlotNever, kContentNone};
    }
  }

  template <typename Team>
  NWOR_RULE void fill(Team& team, int64_t block, int64_t number) const {
    if (team.index() == 0) {
      group.stores[block] = number;
    }
    for (int64_t o = team.index(); o < group.block_size; o += team.size()) {
      group.records[block * group.block_size + o].state = kSlotLoaded;
    }
  }

  // What is known of the block is kept, with the store's number.
  template <typename Team>
  NWOR_RULE void store(Team& team, int64_t block, int64_t number) const {
    if (team.index() == 0) {
      check_stored(group, block, step);
    }
    if (number == 0) {
      return;
    }
    const int64_t kept = group.kept_block(number);
    if (team.index() == 0) {
      group.stores[kept] = number;
    }
    const int64_t size = group.block_size;
    for (int64_t o = team.index(); o < size; o += team.size()) {
      group.records[kept * size + o] = group.records[block * size + o];
    }
    const int64_t num_sums = size * group.num_columns;
    for (int64_t i = team.index(); i < num_sums; i += team.size()) {
      group.contents[kept * num_sums + i] = group.contents[block * num_sums + i];
    }
  }
};

// --- publish ---------------------------------------------------------------------

// The end of a step, by one team: all rows were judged; the header and what was found
// since the last one go to the host.
struct Publish : AuditResolveArgs {
  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    FindingsHeader* const header = group.header;
    if (header->num_suspects > 0) {
      for (int64_t i = team.index(); i < num_tokens; i += team.size()) {
        judge_suspect(*this, i);
      }
      team.sync();
      for (int64_t i = team.index(); i < num_tokens; i += team.size()) {
        group.plan[i].num_same = 0;
      }
    }
    team.sync();
    const int64_t num_new =
        least(team.load(&header->num_findings) - header->num_published, group.capacity);
    constexpr int64_t kWords = sizeof(Finding) / sizeof(int64_t);
    const auto* from = reinterpret_cast<const int64_t*>(header + 1);
    auto* to = reinterpret_cast<int64_t*>(findings_to + 1);
    for (int64_t i = team.index(); i < num_new * kWords; i += team.size()) {
      to[i] = team.load(from + i);
    }
    team.sync();
    if (team.index() == 0) {
      header->num_suspects = 0;
      *findings_to = *header;
      header->num_published = header->num_findings;
      header->cursor = header->next_cursor;
    }
  }
};

// --- calls -----------------------------------------------------------------------

// Device: run(pass, n): for n teams; run_slots(pass, n), run_scan(pass): for slots
// whose bytes are read; check(args), check(part): whether it can.

template <typename Device>
void call(const Device& device, const AuditSeatArgs& args) {
  device.run(SeatRequest{args}, 1);
}

template <typename Device>
void call(const Device& device, const AuditPlanArgs& args) {
  device.check(args);
  device.run(PlanRequests{args}, args.batch.num_reqs);
}

template <typename Device>
void scan(const Device& device, const AuditResolveArgs& args, int64_t row,
          int64_t num_blocks) {
  for (int64_t i = 0; num_blocks > 0 && i < args.group.num_parts; ++i) {
    device.run_scan(ScanSlots{args, args.parts[i], row, num_blocks});
  }
}

template <typename Device>
void call(const Device& device, const AuditResolveArgs& args) {
  device.check(args);
  device.run(KeepRequests{args}, args.batch.num_reqs);
  device.run(CheckRequests{args}, args.batch.num_reqs);
  for (int64_t i = 0; i < args.group.num_parts; ++i) {
    const RecordRows rows{args, args.parts[i]};
    device.run_slots(rows, args.num_tokens);
  }
  for (int64_t i = 0; i < args.num_hits; ++i) {
    device.run(AdoptHit{args, args.hits[i]}, 1);
    scan(device, args, args.hits[i].row, args.num_hit_blocks);
  }
  scan(device, args, -1, args.num_blocks);
  device.run(Publish{args}, 1);
}

template <typename Device>
void call(const Device& device, const AuditBlocksArgs& args) {
  for (int64_t first = 0; first < args.count; first += BlockEvents::kMaxCount) {
    BlockEvents events{args.group, args.event, args.step, 0, {}, {}};
    for (int64_t& i = events.num_blocks;
         i < BlockEvents::kMaxCount && first + i < args.count; ++i) {
      events.blocks[i] = args.blocks[first + i];
      events.values[i] = args.values[first + i];
    }
    device.run(events, events.num_blocks);
  }
}

template <typename Device>
void call(const Device& device, const AuditSnapshotArgs& args) {
  for (int64_t i = 0; i < args.group.num_parts; ++i) {
    device.check(args.parts[i]);
    device.run_slots(SnapshotSlots{args, args.parts[i]}, args.group.num_slots());
  }
}

}  // namespace nwor
