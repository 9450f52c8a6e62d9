// SPDX-License-Identifier: Apache-2.0
//
// How the rules of audit_rules.h are applied to requests, slots and blocks, on the CPU
// and on CUDA. A step is plan, the forward, then keep, record, check, for each request
// that is new in the batch adopt and scan, then scan of all, and publish.
//
// Each pass is for a team of threads that all call it: a thread block on CUDA
// (audit_cuda.cu, `Block`), one thread on the CPU (audit_cpu.cpp, `Solo`). A team has
//
//   index(), size()      of this thread, and of the team
//   sync()               what the team's threads wrote is seen by all of them
//   sum(value)           up to this thread, and of all
//   of_first(value)      the first thread's; a sync lies between two calls
//   is_first_warp(), is_last_warp(), kLanes, lane(), and for all lanes of a warp:
//   warp_sum(value)      up to this lane
//   num_lanes(is), first_lane(is), of_last_lane(value)     first_lane: -1 if there is
//   none num_accepted(...)    of window.h checksums(part, slot)  of a slot in the
//   part's layers, after a sync
//
// Values that come from the device are not trusted: a request whose seat or rows are
// out of range is left alone.
#pragma once

#include "audit_rules.h"

namespace nwor {

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
template <typename Team>
NWOR_RULE void seat_request(Team& team, const AuditSeatArgs& args) {
  const AuditGroup& group = args.group;
  const int64_t length = args.fresh.hit_length;
  int64_t hash = args.fresh.seed;
  for (int64_t first = 0; first < length; first += team.size()) {
    const int64_t p = first + team.index();
    const TeamSum sum = team.sum(p < length ? identity_of(args.tokens[p], p) : 0);
    if (p < length && group.is_block_end(p)) {
      group.expected_at(args.seat, p / group.block_size) = add(hash, sum.inclusive);
    }
    hash = add(hash, sum.total);
  }
  for (int64_t b = length / group.block_size + team.index(); b < group.max_blocks;
       b += team.size()) {
    group.expected_at(args.seat, b) = 0;
  }
  if (team.index() == 0) {
    Seat seat = args.fresh;
    seat.hash = hash;
    seat.length = length;
    group.seats[args.seat] = seat;
  }
}

template <typename Team>
NWOR_RULE void plan_request(Team& team, const AuditPlanArgs& args, int64_t r) {
  const Rows rows = rows_of(args, r);
  if (rows.begin == rows.end) {
    return;
  }
  const int64_t seat_index = args.batch.row_seats.at(r);
  int64_t hash = team.of_first(
      team.index() == 0 ? base_of(args.group, seat_index, args.positions[rows.begin])
                        : 0);
  for (int64_t first = rows.begin; first < rows.end; first += team.size()) {
    const int64_t i = first + team.index();
    const TeamSum sum =
        team.sum(i < rows.end ? identity_of(args.tokens[i], args.positions[i]) : 0);
    if (i < rows.end) {
      plan_row(args, r, i, add(hash, sum.inclusive));
    }
    hash = add(hash, sum.total);
  }
}

// What is kept, of all requests, before any is checked: one may have found another's
// block in this step.
template <typename Team>
NWOR_RULE void keep_request(Team& team, const AuditResolveArgs& args, int64_t r) {
  const Rows rows = rows_of(args, r);
  const int64_t num_drafts = num_drafts_of(args, r);
  const int64_t accepted =
      num_drafts > 0 ? team.num_accepted(args.acceptance, r, num_drafts) : 0;
  const int64_t kept_end = kept_end_of(rows.end, num_drafts, accepted);
  for (int64_t i = rows.begin + team.index(); i < rows.end; i += team.size()) {
    keep_row(args, r, i, i < kept_end, i == kept_end - 1);
  }
}

// Whether a request's table leads to what it wrote and has written.
template <typename Team>
NWOR_RULE void check_request(Team& team, const AuditResolveArgs& args, int64_t r) {
  const AuditGroup& group = args.group;
  const Rows rows = rows_of(args, r);
  if (!rows.is_valid) {
    return;
  }
  const Seat& seat = group.seats[args.batch.row_seats.at(r)];
  if (seat.opaque) {
    return;
  }
  int64_t num_compared = 0;
  for (int64_t i = rows.begin + team.index(); i < rows.end; i += team.size()) {
    num_compared += check_row(args, r, i);
  }
  team.sync();  // a row that is reported takes its block's end off
  const int64_t end = least(seat.length / group.block_size, group.max_blocks);
  for (int64_t b = group.first_block(seat.length) + team.index(); b < end;
       b += team.size()) {
    num_compared += check_end(args, r, b);
  }
  const int64_t total = team.sum(num_compared).total;
  if (team.index() == 0) {
    count(group.header->num_identities, total);
  }
}

template <typename Team>
NWOR_RULE void adopt(Team& team, const AuditStep& args, const AuditHit& hit) {
  const AuditGroup& group = args.group;
  const int64_t seat_index = args.batch.row_seats.at(hit.row);
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
  // From the last on: a block that is reported is not known to the next any more.
  const int64_t first = group.first_block(hit.length);
  for (int64_t end = group.last_block(hit.length); end > first; end -= team.size()) {
    const int64_t b = end - 1 - team.index();
    const int64_t hash = b >= first ? hash_before(group, seat_index, b) : 0;
    team.sync();
    if (b >= first) {
      adopt_block(args, hit, b, hash);
    }
  }
}

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

template <typename Team>
NWOR_RULE void keep_checksums(Team& team, int32_t* known, const int32_t* found,
                              int64_t num_layers) {
  for (int64_t i = team.index(); i < num_layers; i += team.size()) {
    known[i] = found[i];
  }
}

// Row i of a step: what was written, once it is known what is kept.
template <typename Team>
NWOR_RULE void record_row(Team& team, const AuditResolveArgs& args,
                          const AuditPart& part, int64_t i) {
  const AuditGroup& group = args.group;
  const PlanRow& row = group.plan[i];
  const int64_t slot = row.slot;
  // One value for all threads: judging a row changes its `suspect`.
  const bool is_recorded = slot >= 0 && slot < group.num_slots() && row.suspect == 0;
  const bool is_judged = row.old.content != kContentNone;
  team.sync();
  if (!is_recorded) {
    return;
  }
  const int64_t num_layers = part.table.num_layers;
  int32_t* const known = part.known(group, slot);
  const int32_t* const found = team.checksums(part, slot);
  if (is_judged && team.is_first_warp()) {
    const Compared compared = compare(team, known, found, num_layers);
    if (team.index() == 0) {
      judge_row(args, part, i, compared);
    }
  }
  team.sync();
  keep_checksums(team, known, found, num_layers);
  if (part.is_last && team.index() == 0) {
    group.records[slot].content = kContentKnown;
  }
  team.sync();  // before the next row's checksums
}

// When all rows were judged: by the last team.
template <typename Team>
NWOR_RULE void judge_suspects(Team& team, const AuditResolveArgs& args,
                              const AuditPart& part) {
  FindingsHeader* const header = args.group.header;
  const int64_t num_suspects = team.load(&header->num_suspects);
  team.sync();
  if (team.index() == 0) {
    header->num_blocks_done = 0;
    header->num_suspects = 0;
  }
  if (num_suspects == 0) {
    return;
  }
  for (int64_t i = team.index(); i < args.num_tokens; i += team.size()) {
    judge_suspect(args, part, i);
  }
  team.sync();
  for (int64_t i = team.index(); i < args.num_tokens; i += team.size()) {
    args.group.plan[i].suspect = least(args.group.plan[i].suspect, 0);
  }
}

// By a warp: compares the slots of a full block from its end back, a record's own token
// leading from its H to the one before, up to the first that is wrong or not known.
template <typename Team>
NWOR_RULE void check_block(Team& team, const AuditStep& args, int64_t r, int64_t b) {
  const AuditGroup& group = args.group;
  const int64_t seat_index = args.batch.row_seats.at(r);
  int64_t hash = group.expected_at(seat_index, b);
  if (hash == 0 || group.seats[seat_index].opaque) {
    return;
  }
  const int64_t begin = b * group.block_size;
  for (int64_t last = begin + group.block_size - 1; last >= begin;
       last -= team.num_lanes()) {
    const int64_t p = last - team.lane();
    const int64_t slot = p >= begin ? args.slot(r, p) : -1;
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
        report_prefix(group, slot, p, here, seat_index, args.step);
      }
      return;
    }
    hash = subtract(hash, team.of_last_lane(through));
  }
}

// The blocks of a row that a scan looks at.
struct RowBlocks {
  int64_t first;
  int64_t count;
};
NWOR_RULE RowBlocks blocks_of(const AuditStep& args, const ScanRange& range,
                              int64_t r) {
  const AuditGroup& group = args.group;
  const int64_t seat_index = args.batch.row_seats.at(r);
  if (seat_index < 0 || seat_index >= group.num_seats) {
    return {0, 0};
  }
  const Seat& seat = group.seats[seat_index];
  const int64_t length = range.row < 0 ? seat.length : seat.hit_length;
  const int64_t first = group.first_block(length);
  const int64_t end = group.last_block(length);
  return {first, end > first ? end - first : 0};
}

// The blocks of a scan's rows, side by side, and which of them it looks at: `count`
// from `start` on and around.
struct Places {
  int64_t first_row;
  int64_t num_rows;
  const int64_t* ends;  // [num_rows]: blocks of the rows up to each, it included
  int64_t total;
  int64_t start;
  int64_t count;
};

// ends: room for them, of the team.
template <typename Team>
NWOR_RULE Places places_of(Team& team, const AuditStep& args, const ScanRange& range,
                           int64_t* ends) {
  const bool is_hit = range.row >= 0;
  Places places{
      is_hit ? range.row : 0, is_hit ? 1 : args.batch.num_reqs, ends, 0, 0, 0};
  for (int64_t first = 0; first < places.num_rows; first += team.size()) {
    const int64_t i = first + team.index();
    const bool is_row = i < places.num_rows;
    const TeamSum sum =
        team.sum(is_row ? blocks_of(args, range, places.first_row + i).count : 0);
    if (is_row) {
      ends[i] = places.total + sum.inclusive;
    }
    places.total += sum.total;
  }
  team.sync();
  places.count = least(range.num_blocks, places.total);
  places.start = is_hit ? 0 : args.group.header->cursor;
  return places;
}

// By one thread of all teams.
NWOR_RULE void move_cursor(const AuditGroup& group, const ScanRange& range,
                           const Places& places) {
  if (range.row < 0 && places.total > 0) {
    group.header->next_cursor = (places.start + places.count) % places.total;
  }
}

// Slot number `unit` of the blocks that a scan looks at.
template <typename Team>
NWOR_RULE void scan_slot(Team& team, const AuditResolveArgs& args,
                         const AuditPart& part, const ScanRange& range,
                         const Places& places, int64_t unit) {
  const AuditGroup& group = args.group;
  const int64_t n = (places.start + unit / group.block_size) % places.total;
  const int64_t o = unit % group.block_size;
  // The row: the first that ends behind n.
  int64_t low = 0;
  for (int64_t high = places.num_rows - 1; low < high;) {
    const int64_t middle = (low + high) / 2;
    if (places.ends[middle] > n) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const int64_t r = places.first_row + low;
  const int64_t b =
      blocks_of(args, range, r).first + n - (low == 0 ? 0 : places.ends[low - 1]);
  const int64_t seat_index = args.batch.row_seats.at(r);
  const int64_t length = group.seats[seat_index].length;
  if (o == 0 && part.is_last && team.is_last_warp() &&
      (b + 1) * group.block_size <= length) {
    check_block(team, args, r, b);
  }
  const int64_t position = b * group.block_size + o;
  const int64_t slot = position < length ? args.slot(r, position) : -1;
  if (!group.is_in_cache(slot) || !has_bytes(group.records[slot])) {
    return;
  }
  SlotRecord& record = group.records[slot];
  // Of the requests that share the slot, one compares it.
  const auto content =
      static_cast<int32_t>(team.of_first(team.index() == 0 ? claim(record) : 0));
  if (content != kContentClaimed) {
    const int64_t num_layers = part.table.num_layers;
    int32_t* const known = part.known(group, slot);
    const int32_t* const found = team.checksums(part, slot);
    if (team.is_first_warp()) {
      const Compared compared = compare(team, known, found, num_layers);
      Stored stored{is_fresh(content) ? stored_slot(group, slot) : kNotStored, {}};
      if (stored.slot >= 0) {
        stored.compared =
            compare(team, part.known(group, stored.slot), found, num_layers);
      }
      if (team.index() == 0) {
        judge_slot(args, part, seat_index, slot, position, content, compared, stored);
        count(group.header->num_contents, part.is_last && content == kContentKnown);
      }
    }
    team.sync();
    keep_checksums(team, known, found, num_layers);
    team.sync();
    if (team.index() == 0) {
      release(record, part.is_last ? int32_t{kContentKnown} : content);
    }
  }
  team.sync();  // before the next slot's content and checksums
}

template <typename Team>
NWOR_RULE void snapshot_slot(Team& team, const AuditGroup& group, const AuditPart& part,
                             bool again, int64_t slot) {
  if (!is_taken(group.records[slot], again)) {
    return;
  }
  const int32_t* const found = team.checksums(part, slot);
  keep_checksums(team, part.known(group, slot), found, part.table.num_layers);
  if (team.index() == 0) {
    group.records[slot].content = kContentKnown;
  }
  team.sync();
}

// --- blocks ----------------------------------------------------------------------

template <typename Team>
NWOR_RULE void block_event(Team& team, const AuditBlocksArgs& args, int64_t block,
                           int64_t value) {
  const AuditGroup& group = args.group;
  const int64_t size = group.block_size;
  SlotRecord* const records = group.records + block * size;
  if (args.event == kGiven) {
    if (team.index() == 0) {
      group.owners[block] = static_cast<int32_t>(value);
    }
    for (int64_t o = team.index(); o < size && value == 0; o += team.size()) {
      records[o] = {0,          -1,          0, records[o].step, records[o].generation,
                    kSlotNever, kContentNone};
    }
  } else if (args.event == kFilled) {
    if (team.index() == 0) {
      group.stores[block] = value;
    }
    for (int64_t o = team.index(); o < size; o += team.size()) {
      records[o].state = kSlotLoaded;
    }
  } else {
    if (team.index() == 0) {
      check_stored(group, block, args.step);
    }
    if (value == 0) {
      return;
    }
    const int64_t kept = group.kept_block(value);
    if (team.index() == 0) {
      group.stores[kept] = value;
    }
    for (int64_t o = team.index(); o < size; o += team.size()) {
      group.records[kept * size + o] = records[o];
    }
    const int64_t num_sums = size * group.num_columns;
    for (int64_t i = team.index(); i < num_sums; i += team.size()) {
      group.contents[kept * num_sums + i] = group.contents[block * num_sums + i];
    }
  }
}

// --- publish ---------------------------------------------------------------------

// The end of a step: the header and what was found since the last one.
template <typename Team>
NWOR_RULE void publish(Team& team, const AuditResolveArgs& args) {
  FindingsHeader* const header = args.group.header;
  const int64_t num_new =
      least(header->num_findings - header->num_published, args.group.capacity);
  constexpr int64_t kWords = sizeof(Finding) / sizeof(int64_t);
  const auto* from = reinterpret_cast<const int64_t*>(header + 1);
  auto* to = reinterpret_cast<int64_t*>(args.findings_to + 1);
  for (int64_t i = team.index(); i < num_new * kWords; i += team.size()) {
    to[i] = from[i];
  }
  team.sync();
  if (team.index() == 0) {
    *args.findings_to = *header;
    header->num_published = header->num_findings;
    header->cursor = header->next_cursor;
  }
}

}  // namespace nwor
