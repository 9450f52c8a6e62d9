// SPDX-License-Identifier: Apache-2.0
//
// The audit's passes over requests, slots and blocks, and their order, for the CPU and
// for CUDA.
//
// Teams of threads run a pass and share its work; all threads of a team call it. A team
// is a thread block on CUDA (audit_cuda.cu, `Block`), one thread on the CPU
// (audit_cpu.cpp, `Solo`). It has
//
//   share(count)         the items that are this team's: Share
//   index(), size()      of this thread, and of the team
//   sync()               what the team's threads wrote is seen by all of them
//   sum(value)           up to this thread, and of all
//   of_first(value)      the first thread's; a sync lies between two calls
//   load(address)        a value that other teams may have written
//   room(count)          for as many int64, of the team
//   num_accepted(...)    of window.h
//   checksums(...)       of a slot in all layers; ends with a sync
//   is_last_of(n, ticket)  whether n - 1 other teams were here before; `load` sees what
//                        they wrote
//
// and of its warps is_first_warp(), is_last_warp(), lane(), num_lanes(), and for all
// lanes of one: warp_sum(value), up to this lane; count_lanes(is); first_lane(is), -1
// if it is none; of_last_lane(value). Of a sample of a state: sum_parts(parts,
// of_word), this lane's of its parts; part(p), which one that is; over_parts(value), of
// all parts.
//
// Threads run concurrently. Data that two of them may touch is updated by atomics: the
// header, a record's state in plan (of the rows that go to one slot one gets what the
// slot held), a record's content in scan (requests share blocks). Everything else
// belongs to one thread of a launch, and launches follow each other.
//
// Values that come from the device are not trusted: a request whose seat or rows are
// out of range is left alone.
#pragma once

#include "audit/audit.h"

#ifdef __CUDACC__
#define NWOR_RULE __device__ inline
#define NWOR_UNROLL _Pragma("unroll")
#else
#define NWOR_RULE inline
#define NWOR_UNROLL
#endif

namespace nwor {

// for (auto [i, end, stride] = team.share(count); i < end; i += stride)
struct Share {
  int64_t i;
  int64_t end;
  int64_t stride;
};

// The sum up to a thread, this one included, and of all.
struct TeamSum {
  uint64_t inclusive;
  uint64_t total;
};

NWOR_RULE uint64_t mix64(uint64_t value) {
  // splitmix64's finaliser.
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31);
}

// What token `token` at `position` adds to H.
NWOR_RULE uint64_t identity_of(int64_t token, int64_t position) {
  return mix64(static_cast<uint64_t>(token) * 0x9E3779B97F4A7C15ULL +
               mix64(static_cast<uint64_t>(position) + 1));
}

// What stands for the token at `position` of a text with these features. In a feature
// it is at most -2, for any token.
NWOR_RULE int32_t text_at(const Feature* features, int64_t num_features, int32_t token,
                          int64_t position) {
  uint64_t sum = 0;
  bool is_token = true;
  for (int64_t i = 0; i < num_features; ++i) {
    const Feature& feature = features[i];
    if (position >= feature.begin && position < feature.end) {
      is_token = false;
      sum += mix64(feature.identity + static_cast<uint64_t>(position - feature.begin));
    }
  }
  return is_token ? token : -2 - static_cast<int32_t>(mix64(sum) >> 34);
}

// The same, of the request in a seat.
NWOR_RULE int32_t text_at(const AuditGroup& group, int64_t seat, int32_t token,
                          int64_t position) {
  return text_at(group.features + seat * kMaxFeatures, group.seats[seat].num_features,
                 token, position);
}

// What word number `index`, 8 bytes, adds to a sum over words.
NWOR_RULE uint64_t word_at(uint64_t word, int64_t index) {
  return mix64(word + static_cast<uint64_t>(index + 1) * 0x9E3779B97F4A7C15ULL);
}

// The same, to a slot's checksum in a layer.
NWOR_RULE uint32_t checksum_of(uint64_t word, int64_t index) {
  return static_cast<uint32_t>(word_at(word, index) >> 32);
}

// Adds `by`; returns the value before.
NWOR_RULE int64_t count(int64_t& counter, int64_t by = 1) {
#ifdef __CUDACC__
  return static_cast<int64_t>(atomicAdd(reinterpret_cast<unsigned long long*>(&counter),
                                        static_cast<unsigned long long>(by)));
#else
  return __atomic_fetch_add(&counter, by, __ATOMIC_RELAXED);
#endif
}

// Stores `value`; returns the value before.
NWOR_RULE int32_t exchange(int32_t& place, int32_t value) {
#ifdef __CUDACC__
  return atomicExch(&place, value);
#else
  return __atomic_exchange_n(&place, value, __ATOMIC_SEQ_CST);
#endif
}

// Orders this thread's earlier memory accesses before its later ones.
NWOR_RULE void fence() {
#ifdef __CUDACC__
  __threadfence();
#endif
}

NWOR_RULE int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// A block whose digest goes to the host at the end of the step. Beyond max_digests
// there is no room: for what requests fill there is always, by the host's choice.
NWOR_RULE void add_digest(const AuditGroup& group, const BlockDigest& digest) {
  const bool is_other = digest.kind != kComputed;
  DigestsHeader& header = *group.digests;
  const int64_t number = count(is_other ? header.num_others : header.num_computed);
  if (number < group.max_digests) {
    *group.digest_at(number + (is_other ? group.max_digests : 0)) = digest;
  }
}

NWOR_RULE void report(const AuditGroup& group, const Finding& finding) {
  const int64_t number =
      count(group.header->num_findings) - group.header->num_published;
  if (number < group.capacity) {
    reinterpret_cast<Finding*>(group.header)[1 + number] = finding;
  }
}

// A finding at `slot`, which belongs to request `owner`.
NWOR_RULE Finding at_slot(const AuditGroup& group, FindingClass kind, int64_t slot,
                          int64_t position, int64_t owner, int64_t step) {
  const SlotRecord& record = group.records[slot];
  return {step,        kind, owner, position, slot, -1, 0, record.generation,
          record.step, 0,    0};
}

// Whether the slot holds, by its record, the text with H = `hash`, or may hold any.
NWOR_RULE bool holds(const SlotRecord& record, uint64_t hash) {
  return record.state == kSlotUnknown ||
         (record.state == kSlotCommitted && record.hash == hash);
}

NWOR_RULE void report_prefix(const AuditGroup& group, int64_t slot, int64_t position,
                             uint64_t hash, int64_t seat, int64_t step) {
  const SlotRecord& record = group.records[slot];
  Finding finding =
      at_slot(group, kWrongPrefix, slot, position, group.seats[seat].generation, step);
  finding.expected = static_cast<int64_t>(hash);
  finding.found =
      record.state == kSlotCommitted ? static_cast<int64_t>(record.hash) : 0;
  report(group, finding);
  // A block is reported once: its end is not compared again.
  if (position / group.block_size < group.max_blocks) {
    group.expected_at(seat, position / group.block_size) = 0;
  }
}

// The record of a write of `token` by `seat`. hash: H of its text with that token.
NWOR_RULE SlotRecord written(uint64_t hash, int32_t token, int64_t position,
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

// --- requests --------------------------------------------------------------------

// Calls visit(i, sum) for items [begin, end); sum: `start` plus of(begin) to of(i).
// Returns the last sum.
template <typename Team, typename Of, typename Visit>
NWOR_RULE uint64_t add_up(Team& team, int64_t begin, int64_t end, uint64_t start,
                          const Of& of, const Visit& visit) {
  for (int64_t first = begin; first < end; first += team.size()) {
    const int64_t i = first + team.index();
    const TeamSum sum = team.sum(i < end ? of(i) : 0);
    if (i < end) {
      visit(i, start + sum.inclusive);
    }
    start += sum.total;
  }
  return start;
}

// A request of the batch, its seat, and its rows.
struct Rows {
  int64_t request;
  int64_t seat;
  int64_t begin;
  int64_t end;
};

// Calls visit(rows, part) for this team's parts of requests, num_parts each.
template <typename Team, typename Visit>
NWOR_RULE void each_part(Team& team, const AuditStep& args, int64_t num_parts,
                         const Visit& visit) {
  auto [n, end, stride] = team.share(args.num_reqs * num_parts);
  for (; n < end; n += stride) {
    const int64_t r = n / num_parts;
    const Rows rows{r, args.row_seats.at(r), args.query_start_loc[r],
                    args.query_start_loc[r + 1]};
    if (rows.seat >= 0 && rows.seat < args.num_seats && rows.begin >= 0 &&
        rows.begin <= rows.end && rows.end <= args.num_tokens) {
      visit(rows, n % num_parts);
    }
  }
}

// Calls visit(rows) for this team's requests.
template <typename Team, typename Visit>
NWOR_RULE void each_request(Team& team, const AuditStep& args, const Visit& visit) {
  each_part(team, args, 1, [&](const Rows& rows, int64_t) { visit(rows); });
}

// How many of a request's rows are kept, of a pass with cu_num_logits and acceptance.
template <typename Team, typename Pass>
NWOR_RULE int64_t num_kept_of(Team& team, const Pass& pass, const Rows& rows) {
  const int64_t r = rows.request, num_rows = rows.end - rows.begin;
  if (pass.cu_num_logits == nullptr) {
    return num_rows;
  }
  const int64_t num_drafts =
      pass.cu_num_logits[r] - (r == 0 ? 0 : pass.cu_num_logits[r - 1]) - 1;
  if (num_drafts <= 0) {
    return num_rows;
  }
  const int64_t num_accepted =
      least(team.num_accepted(pass.acceptance, r, num_drafts), num_drafts);
  return num_rows - num_drafts + (num_accepted > 0 ? num_accepted : 0);
}

// Adds a request to the batch.
struct SeatRequest : AuditSeatArgs {
  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    const int64_t length = fresh.hit_length;
    const uint64_t hash = add_up(
        team, 0, length, fresh.seed,
        [&](int64_t p) {
          return identity_of(text_at(fresh_features, fresh.num_features, tokens[p], p),
                             p);
        },
        [&](int64_t p, uint64_t here) {
          if (is_block_end(p)) {
            expected_at(seat, p / block_size) = here;
          }
        });
    for (int64_t b = length / block_size + team.index(); b < max_blocks;
         b += team.size()) {
      expected_at(seat, b) = 0;
    }
    for (int64_t i = team.index(); i < fresh.num_features; i += team.size()) {
      features[seat * kMaxFeatures + i] = fresh_features[i];
    }
    if (team.index() == 0) {
      seats[seat] = fresh;
      seats[seat].hash = hash;
      seats[seat].length = length;
      if (length > 0) {
        const int32_t last =
            text_at(fresh_features, fresh.num_features, tokens[length - 1], length - 1);
        seats[seat].last_of_hit = last < 0 ? -1 : last;
      }
    }
  }
};

struct PlanRequests : AuditPlanArgs {
  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    each_request(team, *this, [&](const Rows& rows) {
      if (rows.begin == rows.end) {
        return;
      }
      const uint64_t base = team.of_first(team.index() == 0 ? base_of(rows) : 0);
      add_up(
          team, rows.begin, rows.end, base,
          [&](int64_t i) { return identity_of(text(rows, i), positions[i]); },
          [&](int64_t i, uint64_t hash) { plan_row(rows, i, hash); });
    });
  }

  // The text that row i writes.
  NWOR_RULE int32_t text(const Rows& rows, int64_t i) const {
    return text_at(*this, rows.seat, tokens[i], positions[i]);
  }

  // H before the request's first row of this step. After a load that failed a request
  // goes back to the begin of a block. If it goes back to any other position, its text
  // is unknown from then on.
  NWOR_RULE uint64_t base_of(const Rows& rows) const {
    Seat& seat = seats[rows.seat];
    const int64_t start = positions[rows.begin];
    uint64_t hash = seat.seed;
    if (start == seat.length) {
      hash = seat.hash;
    } else if (start != 0) {
      const bool is_back = start < seat.length && is_block_end(start - 1) &&
                           start / block_size <= max_blocks;
      const uint64_t known =
          is_back ? expected_at(rows.seat, start / block_size - 1) : 0;
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

  // Plans the write of row i. hash: H of the text with that row.
  NWOR_RULE void plan_row(const Rows& rows, int64_t i, uint64_t hash) const {
    const Seat& seat = seats[rows.seat];
    const int64_t position = positions[i];
    const int64_t to = slot_mapping[i];
    const int32_t token = text(rows, i);
    PlanRow& row = plan[i];
    row = {-1, hash, position, token, kSlotPlanned, rows.seat, 0, 0, {}};
    if (to < 0) {
      return;
    }
    const bool is_there = to < num_slots();
    const int64_t of_table = slot(rows.request, position);
    const int64_t owner = is_there ? owners[to / block_size] : 0;
    const bool is_own =
        owner == seat.generation || (seat.loads && position < seat.hit_length);
    if (to != of_table || !is_there || !is_own) {
      report(*this, {step, kForeignWrite, owner, position, to, -1, 0, seat.generation,
                     step, of_table, to});
    }
    if (!is_there) {
      return;
    }
    SlotRecord& record = records[to];
    row.slot = to;
    // Before the exchange: another row for the same slot writes the record after its
    // own.
    row.old = record;
    fence();
    row.old.state = exchange(record.state, kSlotPlanned);
    // A load fills whole blocks, including the one in which a hit ends.
    const int64_t hit = seat.hit_length;
    const bool is_behind_hit = seat.loads == kUnknownLoads && hit > 0 &&
                               position >= hit &&
                               position / block_size == (hit - 1) / block_size;
    if (row.old.state == kSlotPlanned) {
      // Another row of this step, or of one that failed: it has no checksums.
      row.old.state = kSlotUnknown;
      row.old.content = kContentNone;
      row.num_same = -1;
    } else if (row.old.state == kSlotLoaded || is_behind_hit ||
               row.old.content != kContentKnown) {
      row.old.content = kContentNone;
    }
    record = written(hash, token, position, step, seat, kSlotPlanned, kContentNone);
  }
};

// H is a sum, so that another seed moves each H of a text by as much: of the seat, its
// block ends, and the rows that this step plans and their records.
struct Reseed : AuditReseedArgs {
  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    for (int64_t b = team.index(); b < max_blocks; b += team.size()) {
      uint64_t& known = expected_at(seat, b);
      known += known == 0 ? 0 : delta;
    }
    for (int64_t i = team.index(); i < num_tokens; i += team.size()) {
      if (plan[i].seat == seat) {
        move_row(plan[i]);
      }
    }
    if (team.index() == 0) {
      seats[seat].hash += delta;
      seats[seat].seed += delta;
    }
  }

  NWOR_RULE void move_row(PlanRow& row) const {
    // Another row of this step may have gone to the same slot.
    if (row.slot >= 0 && records[row.slot].state == kSlotPlanned &&
        records[row.slot].hash == row.hash) {
      records[row.slot].hash += delta;
    }
    row.hash += delta;
  }
};

// Records the kept rows of all requests before any is checked: a request may have found
// another's block in this step.
struct KeepRequests : AuditResolveArgs {
  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    each_request(team, *this, [&](const Rows& rows) {
      const bool is_undone = is_window_undone(rows.request);
      const int64_t kept_end = rows.begin + num_kept_of(team, *this, rows);
      for (int64_t i = rows.begin + team.index(); i < rows.end; i += team.size()) {
        const SlotState state = i < kept_end ? kSlotCommitted
                                : is_undone  ? kSlotUndone
                                             : kSlotRejected;
        keep_row(rows.seat, i, state, i == kept_end - 1);
      }
      team.sync();
    });
  }

  // Row i is kept, or was a draft that is rejected. is_end: the last one that is kept.
  NWOR_RULE void keep_row(int64_t seat_index, int64_t i, SlotState state,
                          bool is_end) const {
    Seat& seat = seats[seat_index];
    PlanRow& row = plan[i];
    const bool is_kept = state == kSlotCommitted;
    row.state = state;
    if (row.slot >= 0) {
      SlotRecord& record = records[row.slot];
      if (record.state != kSlotPlanned || record.hash != row.hash) {
        // Another row of this step went to the same slot.
      } else if (state == kSlotUndone) {
        record = row.old;
      } else {
        record.state = seat.opaque && is_kept ? kSlotUnknown : row.state;
      }
    }
    const int64_t block = row.position / block_size;
    if (is_kept && is_block_end(row.position) && !seat.opaque && block < max_blocks) {
      expected_at(seat_index, block) = row.hash;
    }
    if (is_kept && is_block_end(row.position) && row.slot >= 0 && max_digests > 0) {
      add_digest(*this,
                 {seat.opaque ? 0 : row.hash, row.slot / block_size,
                  row.position + 1 - block_size, seat.generation, 0, kComputed, 0, 0});
    }
    if (is_end && (seat.handover & kGives) != 0 && row.slot >= 0 && max_digests > 0) {
      add_digest(*this, {row.hash, row.slot / block_size, block * block_size,
                         seat.generation, row.position % block_size + 1, kTail, 0, 0});
    }
    if (is_end) {
      seat.hash = row.hash;
      seat.length = row.position + 1;
    }
  }
};

// Checks that the requests' block tables lead to the text that they wrote, in this step
// and before.
struct CheckRequests : AuditResolveArgs {
  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    each_request(team, *this, [&](const Rows& rows) {
      const Seat& seat = seats[rows.seat];
      if (seat.opaque) {
        return;
      }
      int64_t num_compared = 0;
      for (int64_t i = rows.begin + team.index(); i < rows.end; i += team.size()) {
        const PlanRow& row = plan[i];
        if (row.state == kSlotCommitted && row.slot >= 0) {
          num_compared += check(rows, row.position, row.hash);
        }
      }
      team.sync();  // a report clears the expected H of its block's end
      const int64_t end = least(seat.length / block_size, max_blocks);
      for (int64_t b = first_block(seat.length) + team.index(); b < end;
           b += team.size()) {
        const uint64_t hash = expected_at(rows.seat, b);
        const int64_t position = (b + 1) * block_size - 1;
        if (hash != 0) {
          num_compared += check(rows, position, hash);
        }
      }
      const int64_t total = team.sum(num_compared).total;
      if (team.index() == 0) {
        count(header->num_identities, total);
      }
    });
  }

  // Where the table has `position`. Returns slots compared.
  NWOR_RULE int64_t check(const Rows& rows, int64_t position, uint64_t hash) const {
    const int64_t there = slot(rows.request, position);
    if (!is_in_cache(there)) {
      return 0;
    }
    if (!holds(records[there], hash)) {
      report_prefix(*this, there, position, hash, rows.seat, step);
    }
    return 1;
  }
};

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

// Takes over the cached prefix of a new request.
struct AdoptHit : AuditResolveArgs {
  AuditHit hit;

  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    const int64_t seat_index = row_seats.at(hit.row);
    if (seat_index < 0 || seat_index >= num_seats) {
      return;
    }
    const int64_t end = last_block(hit.length);
    const int64_t begin = first_block(hit.length);
    int64_t b = begin + team.index();
    uint64_t hash = b < end ? hash_before(seat_index, b) : 0;
    for (int64_t first = begin; first < end; first += team.size()) {
      // Read before this block is adopted: a report clears its expected H.
      const int64_t next = b + team.size();
      const uint64_t hash_of_next = next < end ? hash_before(seat_index, next) : 0;
      team.sync();
      if (b < end) {
        adopt_block(seat_index, b, hash);
      }
      b = next;
      hash = hash_of_next;
    }
  }

  // H before block b, of a seat that was just assigned.
  NWOR_RULE uint64_t hash_before(int64_t seat_index, int64_t b) const {
    return b == 0 ? seats[seat_index].seed : expected_at(seat_index, b - 1);
  }

  // Block b of the hit, whose text before it is H = `hash`. Of an opaque text's only
  // what was loaded is taken over; all else is left as it is, and unverified.
  NWOR_RULE void adopt_block(int64_t seat_index, int64_t b, uint64_t hash) const {
    const Seat& seat = seats[seat_index];
    int64_t num_identities = 0;
    int64_t num_unverified = 0;
    int64_t num_loaded = 0;
    bool is_reported = false;
    for (int64_t p = b * block_size; p < least((b + 1) * block_size, hit.length); ++p) {
      const int32_t token = text_at(*this, seat_index, hit.tokens[p], p);
      hash += identity_of(token, p);
      const int64_t there = slot(hit.row, p);
      if (!is_in_cache(there)) {
        continue;
      }
      ++num_identities;
      SlotRecord& record = records[there];
      const int64_t stored =
          record.state == kSlotLoaded ? stored_slot(*this, there) : kNotStored;
      if (stored >= 0) {
        const bool has_old = record.content != kContentNone;
        record = records[stored];
        record.content = has_old ? kContentReplaced : kContentLoaded;
      } else if (stored == kStoreForgotten) {
        stores[there / block_size] = 0;  // what follows is counted here
      }
      const bool is_loaded = record.state == kSlotLoaded || seat.loads == kUnknownLoads;
      if (is_loaded || (record.state == kSlotUnknown && !seat.opaque)) {
        ++num_unverified;
        num_loaded += is_loaded;
        // A token of -1: another group's block, or an unknown owner.
        const bool is_other = record.state == kSlotLoaded && !seat.opaque &&
                              record.content == kContentKnown && record.token >= 0 &&
                              record.token != token;
        record = written(hash, token, p, step, seat,
                         seat.opaque ? kSlotUnknown : kSlotCommitted,
                         is_other    ? kContentReplaced
                         : is_loaded ? kContentNone
                                     : static_cast<SlotContent>(record.content));
      } else if (seat.opaque) {
        ++num_unverified;
      } else if (!holds(record, hash) && !is_reported) {
        is_reported = true;
        report_prefix(*this, there, p, hash, seat_index, step);
      }
    }
    count(header->num_identities, seat.opaque ? 0 : num_identities);
    count(header->num_unverified, num_unverified);
    if (seat.opaque || max_digests == 0) {
      return;
    }
    const int64_t first = b * block_size;
    const int64_t there = slot(hit.row, first) / block_size;
    const bool is_handed = seat.handover != kNoHandover;
    if (num_loaded > 0 || (is_handed && num_identities == block_size)) {
      add_digest(*this, {hash, there, first, seat.generation, num_loaded,
                         num_loaded > 0 ? kLoaded : kFound, 0, 0});
    }
    const int64_t num_slots = hit.length - first;
    if ((seat.handover & kTakes) != 0 && num_slots < block_size &&
        num_identities == num_slots) {
      add_digest(*this, {hash, there, first, seat.generation, num_slots, kTail, 0, 0});
    }
  }
};

// --- bytes -----------------------------------------------------------------------

// A slot's checksums by layer, those known and those found.
struct Compared {
  const int32_t* known;
  const int32_t* found;
  int64_t num_same;
  int64_t first_same;
  int64_t first_other;
};

// A pass over slots' bytes. layers: of the first of `parts`, which only the host can
// read; on CUDA all of them.
template <typename Args>
struct OfBytes : Args {
  LayerTable layers;

  explicit OfBytes(const Args& args) : Args(args), layers(args.parts[0].table) {}

  // [num_columns]: a slot's known checksums.
  NWOR_RULE int32_t* known(int64_t slot) const {
    return this->contents + slot * this->num_columns;
  }

  // Stores a slot's checksums as the known ones.
  template <typename Team>
  NWOR_RULE void keep(Team& team, int64_t slot, const int32_t* found) const {
    for (int64_t i = team.index(); i < this->num_columns; i += team.size()) {
      known(slot)[i] = found[i];
    }
  }

  // Compares with a slot's known checksums. By a warp; all lanes get the result.
  template <typename Team>
  NWOR_RULE Compared compare(Team& team, int64_t slot, const int32_t* found) const {
    Compared compared{known(slot), found, 0, -1, -1};
    for (int64_t first = 0; first < this->num_columns; first += team.num_lanes()) {
      const int64_t i = first + team.lane();
      const bool is_layer = i < this->num_columns;
      const bool is_same = is_layer && team.load(compared.known + i) == found[i];
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

  NWOR_RULE bool is_all(const Compared& compared) const {
    return compared.num_same == this->num_columns;
  }

  NWOR_RULE Finding other_bytes(int64_t slot, int64_t position, int64_t owner,
                                const Compared& compared) const {
    Finding finding = at_slot(*this, kChanged, slot, position, owner, this->step);
    if (!is_all(compared)) {
      finding.layer = compared.first_other;
      finding.num_layers = this->num_columns - compared.num_same;
      finding.expected = static_cast<uint32_t>(compared.known[finding.layer]);
      finding.found = static_cast<uint32_t>(compared.found[finding.layer]);
    }
    return finding;
  }
};

// Records the checksums of the rows that were written, after their states are known.
struct RecordRows : OfBytes<AuditResolveArgs> {
  using OfBytes::OfBytes;

  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    for (auto [i, end, stride] = team.share(num_tokens); i < end; i += stride) {
      const PlanRow& row = plan[i];
      if (row.slot < 0 || row.slot >= num_slots() || row.num_same < 0) {
        continue;
      }
      const int64_t to = row.slot;
      const bool is_judged = row.old.content != kContentNone;
      const int32_t* const found = team.checksums(*this, to);
      if (is_judged && team.is_first_warp()) {
        const Compared compared = compare(team, to, found);
        if (team.index() == 0) {
          judge(plan[i], compared);
        }
      }
      team.sync();
      keep(team, to, found);
      if (team.index() == 0) {
        records[to].content = kContentKnown;
      }
      team.sync();  // before the next row's checksums
    }
  }

  // Compares a row's checksums with the known ones, before they are recorded.
  NWOR_RULE void judge(PlanRow& row, const Compared& compared) const {
    const Seat& seat = seats[row.seat];
    if (row.state == kSlotRejected) {
      return;
    }
    if (row.state == kSlotUndone) {
      if (!is_all(compared)) {
        Finding finding =
            other_bytes(row.slot, row.position, seat.generation, compared);
        finding.writer = seat.generation;
        finding.writer_step = step;
        report(*this, finding);
      }
      return;
    }
    // Another token changes the bytes of every layer; the same one behind another
    // prefix need not (it never does in the first layer). -1 stands for a draft that
    // the scheduler placed before there were any: vLLM computes it as some token.
    if (seat.opaque || row.old.token == row.token || row.old.token < 0 ||
        compared.num_same == 0) {
      return;
    }
    row.num_same = static_cast<int32_t>(compared.num_same);
    row.first_same = static_cast<int32_t>(compared.first_same);
    count(header->num_suspects);
  }
};

// Compares the bytes of slots: those of one row's hit or, with row -1, those of all
// rows from the cursor on.
struct ScanSlots : OfBytes<AuditResolveArgs> {
  int64_t row;
  int64_t max_scanned;

  ScanSlots(const AuditResolveArgs& args, int64_t row, int64_t max_scanned)
      : OfBytes(args), row(row), max_scanned(max_scanned) {}

  // The blocks of all rows in one sequence, and which of them are compared: `count`
  // from `start` on, cyclically.
  struct Places {
    const int64_t* ends;  // [num_rows]: blocks of the rows up to each, it included
    int64_t total;
    int64_t start;
    int64_t count;
  };

  NWOR_HOST_DEVICE int64_t num_rows() const { return row < 0 ? num_reqs : 1; }

  template <typename Team>
  NWOR_RULE Places places(Team& team) const {
    int64_t* const ends = team.room(num_rows());
    const auto total = static_cast<int64_t>(add_up(
        team, 0, num_rows(), 0, [&](int64_t i) { return blocks_of(i).count; },
        [&](int64_t i, uint64_t end) { ends[i] = static_cast<int64_t>(end); }));
    team.sync();
    const bool goes_on = row < 0 && header->cursor < total;
    return {ends, total, goes_on ? header->cursor : 0, least(max_scanned, total)};
  }

  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    const Places all = places(team);
    auto [n, end, stride] = team.share(all.count * block_size);
    if (n == 0 && n < end && team.index() == 0 && row < 0 && all.total > 0) {
      header->next_cursor = (all.start + all.count) % all.total;
    }
    for (; n < end; n += stride) {
      scan(team, all, (all.start + n / block_size) % all.total, n % block_size);
    }
  }

 private:
  struct RowBlocks {
    int64_t first;
    int64_t count;
  };
  NWOR_RULE RowBlocks blocks_of(int64_t i) const {
    const int64_t seat_index = row_seats.at(row < 0 ? i : row);
    if (seat_index < 0 || seat_index >= num_seats) {
      return {0, 0};
    }
    const Seat& seat = seats[seat_index];
    const int64_t length = row < 0 ? seat.length : seat.hit_length;
    const int64_t first = first_block(length);
    const int64_t end = last_block(length);
    return {first, end > first ? end - first : 0};
  }

  // Offset o of place n.
  template <typename Team>
  NWOR_RULE void scan(Team& team, const Places& all, int64_t n, int64_t o) const {
    // The row: the first that ends behind n.
    int64_t low = 0;
    for (int64_t high = num_rows() - 1; low < high;) {
      const int64_t middle = (low + high) / 2;
      if (all.ends[middle] > n) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    const int64_t r = row < 0 ? low : row;
    const int64_t b = blocks_of(low).first + n - (low == 0 ? 0 : all.ends[low - 1]);
    const int64_t seat_index = row_seats.at(r);
    const int64_t length = seats[seat_index].length;
    if (o == 0 && team.is_last_warp() && (b + 1) * block_size <= length) {
      check_block(team, r, seat_index, b);
    }
    const int64_t position = b * block_size + o;
    const int64_t there = position < length ? slot(r, position) : -1;
    if (is_in_cache(there) && (records[there].state == kSlotCommitted ||
                               records[there].state == kSlotUnknown)) {
      check_bytes(team, seats[seat_index].generation, position, there);
    }
  }

  // By a warp: compares the slots of a full block from its end back, a record's own
  // token leading from its H to the one before, up to the first that is wrong or not
  // known.
  template <typename Team>
  NWOR_RULE void check_block(Team& team, int64_t r, int64_t seat_index,
                             int64_t b) const {
    uint64_t hash = expected_at(seat_index, b);
    if (hash == 0 || seats[seat_index].opaque) {
      return;
    }
    const int64_t begin = b * block_size;
    for (int64_t last = begin + block_size - 1; last >= begin;
         last -= team.num_lanes()) {
      const int64_t p = last - team.lane();
      const int64_t there = p >= begin ? slot(r, p) : -1;
      const bool is_known = is_in_cache(there);
      SlotRecord record{};
      if (is_known) {
        record = records[there];
      }
      const uint64_t own = is_known ? identity_of(record.token, p) : 0;
      const uint64_t through = team.warp_sum(own);
      const uint64_t here = hash - (through - own);
      const bool ends = !is_known || record.state == kSlotUnknown;
      const bool is_wrong = !ends && !holds(record, here);
      const int64_t stop = team.first_lane(ends || is_wrong);
      if (stop >= 0) {
        if (is_wrong && team.lane() == stop) {
          report_prefix(*this, there, p, here, seat_index, step);
        }
        return;
      }
      hash -= team.of_last_lane(through);
    }
  }

  template <typename Team>
  NWOR_RULE void check_bytes(Team& team, int64_t owner, int64_t position,
                             int64_t there) const {
    SlotRecord& record = records[there];
    // Of the requests that share the slot, one compares it.
    int32_t content = 0;
    if (team.index() == 0) {
      content = exchange(record.content, kContentClaimed);
      fence();
    }
    content = static_cast<int32_t>(team.of_first(content));
    if (content != kContentClaimed) {
      const int32_t* const found = team.checksums(*this, there);
      if (team.is_first_warp()) {
        const Compared compared = compare(team, there, found);
        // The first comparison after a load: also with what it should have brought.
        const bool is_fresh = content == kContentReplaced || content == kContentLoaded;
        const int64_t stored = is_fresh ? stored_slot(*this, there) : kNotStored;
        Compared with_stored{};
        if (stored >= 0) {
          with_stored = compare(team, stored, found);
        }
        if (team.index() == 0 && is_fresh) {
          judge_loaded(owner, position, there, content, compared, stored, with_stored);
        } else if (team.index() == 0 && content == kContentKnown) {
          count(header->num_contents);
          if (!is_all(compared)) {
            report(*this, other_bytes(there, position, owner, compared));
          }
        }
      }
      team.sync();
      keep(team, there, found);
      team.sync();
      if (team.index() == 0) {
        fence();
        exchange(record.content, kContentKnown);
      }
    }
    team.sync();  // before the next slot's content and checksums
  }

  // Judges a slot that a load filled. stored, with_stored: what it should have brought,
  // or why that is unknown (stored_slot).
  NWOR_RULE void judge_loaded(int64_t owner, int64_t position, int64_t there,
                              int32_t content, const Compared& compared, int64_t stored,
                              const Compared& with_stored) const {
    if (stored == kStoreForgotten) {
      count(header->num_unverified);
      return;
    }
    if (stored >= 0 && is_all(with_stored)) {
      count(header->num_returned);
      return;
    }
    // A single layer's checksum may agree by chance.
    const bool is_sure = num_columns > 1 || stored >= 0;
    if (content == kContentReplaced && is_all(compared) && is_sure) {
      Finding finding = at_slot(*this, kNeverLoaded, there, position, owner, step);
      finding.layer = 0;
      finding.num_layers = num_columns;
      finding.expected = static_cast<int64_t>(records[there].hash);
      report(*this, finding);
    } else if (stored >= 0) {
      Finding finding = other_bytes(there, position, owner, with_stored);
      finding.kind = kHandedOn;
      report(*this, finding);
    }
  }
};

// Takes the digests of the blocks that were added in this step, and writes them to the
// host. A team has a block.
struct TakeDigests : AuditResolveArgs {
  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    const int64_t num_computed = least(digests->num_computed, max_digests);
    const int64_t num_rows = num_computed + least(digests->num_others, max_digests);
    for (auto [i, end, stride] = team.share(num_rows); i < end; i += stride) {
      take(team, i < num_computed ? i : max_digests + i - num_computed);
    }
  }

  template <typename Team>
  NWOR_RULE void take(Team& team, int64_t row) const {
    BlockDigest digest = *digest_at(row);
    const int64_t first = digest.block * block_size;
    uint64_t tokens = 0;
    uint64_t num_unknown = 0;
    const bool is_tail = digest.kind == kTail;
    const int64_t num_slots = is_tail ? digest.num_slots : block_size;
    for (int64_t o = team.index(); o < num_slots; o += team.size()) {
      const SlotRecord& record = records[first + o];
      tokens += identity_of(record.token, o);
      num_unknown += record.state != kSlotCommitted ||
                     record.content != kContentKnown ||
                     (o + 1 == num_slots && record.hash != digest.hash);
    }
    digest.tokens = team.sum(tokens).total;
    digest.is_known = team.sum(num_unknown).total == 0;
    constexpr int64_t kHead = sizeof(BlockDigest) / sizeof(int64_t);
    int64_t* const to = digests_to + (1 + row) * (kHead + num_sums());
    if (team.index() == 0) {
      *reinterpret_cast<BlockDigest*>(to) = digest;
    }
    for (int64_t i = team.index(); i < (is_tail ? num_slots : num_columns);
         i += team.size()) {
      uint64_t sum = 0;
      for (int64_t n = 0; n < (is_tail ? num_columns : block_size); ++n) {
        const int64_t o = is_tail ? i : n, column = is_tail ? n : i;
        sum += word_at(
            static_cast<uint32_t>(contents[(first + o) * num_columns + column]), n);
      }
      to[kHead + i] = static_cast<int64_t>(sum);
    }
  }
};

struct SnapshotSlots : OfBytes<AuditSnapshotArgs> {
  using OfBytes::OfBytes;

  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    for (auto [slot, end, stride] = team.share(num_slots()); slot < end;
         slot += stride) {
      SlotRecord& record = records[slot];
      // No step has written or planned it. For a later snapshot also: since the one
      // before, its block was not given to another group, and no load was to fill it.
      if (record.step == 0 &&
          (!again || (record.content != kContentNone && record.state == kSlotNever))) {
        keep(team, slot, team.checksums(*this, slot));
        if (team.index() == 0) {
          record.content = kContentKnown;
        }
      }
      team.sync();
    }
  }
};

// --- blocks ----------------------------------------------------------------------

struct BlockEvents : AuditBlocksArgs {
  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    for (auto [i, end, stride] = team.share(num_events); i < end; i += stride) {
      const int64_t block = blocks[i];
      const int64_t value = values[i];
      const int64_t first = block * block_size;
      if (event == kStored) {
        store(team, block, value);
        continue;
      }
      if (team.index() == 0 && event == kGiven) {
        owners[block] = static_cast<int32_t>(value);
      } else if (team.index() == 0) {
        stores[block] = value;
      }
      for (int64_t o = team.index(); o < block_size; o += team.size()) {
        SlotRecord& record = records[first + o];
        if (event == kFilled) {
          record.state = kSlotLoaded;
        } else if (value <= 0) {
          record = {0, -1, 0, record.step, record.generation, kSlotNever, kContentNone};
        }
      }
    }
  }

  // Keeps the records and checksums of the block under the store's number.
  template <typename Team>
  NWOR_RULE void store(Team& team, int64_t block, int64_t number) const {
    if (team.index() == 0) {
      check(block);
    }
    if (number == 0) {
      return;
    }
    const int64_t kept = kept_block(number);
    if (team.index() == 0) {
      stores[kept] = number;
    }
    for (int64_t o = team.index(); o < block_size; o += team.size()) {
      records[kept * block_size + o] = records[block * block_size + o];
    }
    const int64_t num_sums = block_size * num_columns;
    for (int64_t i = team.index(); i < num_sums; i += team.size()) {
      contents[kept * num_sums + i] = contents[block * num_sums + i];
    }
  }

  // Each slot of a block that is stored must be committed, and its H follow from the
  // one before, or it is of another text.
  NWOR_RULE void check(int64_t block) const {
    const SlotRecord* of_block = records + block * block_size;
    for (int64_t o = block == 0 ? block_size : 0; o < block_size; ++o) {
      const SlotRecord& record = of_block[o];
      if (record.state == kSlotUnknown) {
        continue;
      }
      const bool is_next =
          o == 0 || of_block[o - 1].state == kSlotUnknown ||
          record.hash == of_block[o - 1].hash +
                             identity_of(record.token, of_block[o - 1].position + 1);
      count(header->num_identities);
      if (record.state == kSlotCommitted && is_next) {
        continue;
      }
      const int64_t position = o == 0 ? record.position : of_block[0].position + o;
      Finding finding = at_slot(*this, kHandedOn, block * block_size + o, position,
                                owners[block], step);
      finding.expected = kSlotCommitted;
      finding.found = record.state;
      report(*this, finding);
      return;
    }
  }
};

// --- publish ---------------------------------------------------------------------

// Ends a step, by one team: judges the suspects, takes a fingerprint of the weights if
// it is due, and copies the header and the new findings to the host.
struct Publish : AuditResolveArgs {
  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    if (header->num_suspects > 0) {
      for (int64_t i = team.index(); i < num_tokens; i += team.size()) {
        judge_suspect(i);
      }
    }
    team.sync();
    if (num_words > 0) {
      take_fingerprint(team);
    }
    const int64_t num_new =
        least(team.load(&header->num_findings) - header->num_published, capacity);
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
      if (max_digests > 0) {
        digests->step = step;
        *reinterpret_cast<DigestsHeader*>(digests_to) = *digests;
        digests->num_computed = digests->num_others = 0;
      }
    }
  }

  // A write at the same time gives a word of before, of after, or of both.
  template <typename Team>
  NWOR_RULE void take_fingerprint(Team& team) const {
    uint64_t sum = 0;
    for (int64_t i = team.index(); i < num_words; i += team.size()) {
      sum += word_at(team.load(words[i]), i);
    }
    sum = team.sum(sum).total;
    if (team.index() == 0) {
      header->fingerprint = sum;
      header->fingerprint_step = step;
    }
  }

  // Row i, after all rows were judged. One checksum of 32 bits in billions agrees by
  // chance: it takes a second one, of another layer, or of this layer at the position
  // before.
  NWOR_RULE void judge_suspect(int64_t i) const {
    const PlanRow& row = plan[i];
    if (row.num_same <= 0) {
      return;
    }
    bool is_sure = row.num_same > 1;
    if (!is_sure && i > 0) {
      const PlanRow& previous = plan[i - 1];
      is_sure = previous.seat == row.seat && previous.num_same > 0 &&
                previous.first_same == row.first_same;
    }
    if (is_sure) {
      const int64_t generation = seats[row.seat].generation;
      report(*this,
             {step, kMissingWrite, generation, row.position, row.slot, row.first_same,
              row.num_same, generation, step, static_cast<int64_t>(row.hash),
              static_cast<int64_t>(row.old.hash)});
    }
  }
};

// --- calls -----------------------------------------------------------------------

// Device: run(pass, n): for n teams; run_slots(pass, n), run_scan(pass): for slots
// whose bytes are read; check(args): whether it can; beside(group): as AuditGroup's.

template <typename Device>
void call(const Device& device, const AuditSeatArgs& args) {
  device.run(SeatRequest{args}, 1);
}

template <typename Device>
void call(const Device& device, const AuditReseedArgs& args) {
  device.run(Reseed{args}, 1);
}

template <typename Device>
void call(const Device& device, const AuditPlanArgs& args) {
  device.check(args);
  device.run(PlanRequests{args}, args.num_reqs);
}

template <typename Device>
void scan(const Device& device, const AuditResolveArgs& args, int64_t row,
          int64_t max_scanned) {
  if (max_scanned > 0 && args.num_parts > 0) {
    device.run_scan(ScanSlots(args, row, max_scanned));
  }
}

template <typename Device>
void call(const Device& device, const AuditResolveArgs& args) {
  device.check(args);
  const Device first = args.is_all_beside ? device.beside(args) : device;
  first.run(KeepRequests{args}, args.num_reqs);
  for (int64_t i = 0; i < args.num_hits; ++i) {
    first.run(AdoptHit{args, args.hits[i]}, 1);
  }
  first.run(CheckRequests{args}, args.num_reqs);
  // What follows reads caches and the audit's own tables, and block tables.
  const Device beside = args.is_all_beside ? first : device.beside(args);
  if (args.num_parts > 0) {
    beside.run_slots(RecordRows(args), args.num_tokens);
  }
  for (int64_t i = 0; i < args.num_hits; ++i) {
    scan(beside, args, args.hits[i].row, args.num_hit_blocks);
  }
  scan(beside, args, -1, args.num_scanned);
  if (args.max_digests > 0) {
    const int64_t num_filled = args.num_tokens / args.block_size + args.num_reqs;
    beside.run(TakeDigests{args},
               num_filled + (args.num_hits > 0 ? args.max_digests : 0));
  }
  beside.run(Publish{args}, 1);
}

template <typename Device>
void call(const Device& device, const AuditBlocksArgs& args) {
  device.run(BlockEvents{args}, args.num_events);
}

template <typename Device>
void call(const Device& device, const AuditSnapshotArgs& args) {
  if (args.num_parts > 0) {
    device.run_slots(SnapshotSlots(args), args.num_slots());
  }
}

}  // namespace nwor
