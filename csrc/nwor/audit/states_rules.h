// SPDX-License-Identifier: Apache-2.0
//
// The passes over recurrent states, for the CPU and for CUDA, by the teams of
// audit_rules.h. Teams share a request's states, a warp has one at a time; the last
// team to end with them finishes the request.
//
// A state is recognized by its content, not by its block: vLLM copies blocks, and the
// metadata of its kernels says which one a step reads. What the accepted token's column
// holds after the step is what the request must find in the next one.
//
// "Not written" is concluded from equal samples, not zero, only if the token is another
// one than the block's states had last (temporal), or than all those in the buffer
// (convolution): the same token again may give the same bits. Nothing is concluded from
// what was there before a token that is not known, or before a place in an image (it is
// below 0 in the plan): places differ where their inputs may not.
//
// A request that comes with a state from the prefix cache must find that of its text:
// the record of the block says of which text its states are, and their samples.
#pragma once

#include "audit/audit_rules.h"
#include "audit/states.h"

namespace nwor {

NWOR_RULE uint64_t state_word(const State& state, int64_t block, int64_t column,
                              int64_t word) {
  const uint8_t* from = state.base + block * state.block_stride +
                        column * state.column_stride + state.offsets[word];
  switch (state.word_bytes) {
    case 2:
      return *reinterpret_cast<const uint16_t*>(from);
    case 4:
      return *reinterpret_cast<const uint32_t*>(from);
    default:
      return *reinterpret_cast<const uint64_t*>(from);
  }
}

// What is kept of a sample: a sum for each of its parts. A warp's lanes have some parts
// each; all must call these.
template <typename Team>
struct Sample {
  static constexpr int64_t kParts = Team::kPartsOfLane;
  uint32_t parts[kParts];

  NWOR_RULE uint64_t whole(const Team& team) const {
    uint64_t sum = 0;
    for (int64_t p = 0; p < kParts; ++p) {
      const auto number = static_cast<uint64_t>(team.part(p)) + 1;
      sum += mix64(parts[p] + number * 0x9E3779B97F4A7C15ULL);
    }
    return team.over_parts(sum);
  }
  // to: [kSampleParts].
  NWOR_RULE void store(const Team& team, uint32_t* to) const {
    for (int64_t p = 0; p < kParts; ++p) {
      to[team.part(p)] = parts[p];
    }
  }
  // Parts that are the same as in `other` [kSampleParts] and not zero.
  NWOR_RULE int64_t num_same(const Team& team, const uint32_t* other,
                             const Sample& zero) const {
    uint64_t number = 0;
    for (int64_t p = 0; p < kParts; ++p) {
      number += parts[p] == other[team.part(p)] && parts[p] != zero.parts[p];
    }
    return static_cast<int64_t>(team.over_parts(number));
  }
};

// Of a column, in scratch: [kSampleParts].
NWOR_RULE uint32_t* parts_of(uint64_t* scratch, int64_t column) {
  return reinterpret_cast<uint32_t*>(scratch) + column * kSampleParts;
}

// A column of a state. block -1: there is none.
struct Column {
  int64_t block;
  int64_t column;
};

// By a warp; all lanes see them: calls visit(i, sample) for the columns column_of(0) to
// column_of(count - 1) that are there. Loads of several are under way at a time.
template <typename Team, typename ColumnOf, typename Visit>
NWOR_RULE void each_sample(Team& team, const State& state, int64_t count,
                           const ColumnOf& column_of, const Visit& visit) {
  constexpr int64_t kAtOnce = 8, kWords = Team::kWordsOfLane;
  for (int64_t first = 0; first < count; first += kAtOnce) {
    uint64_t words[kAtOnce][kWords];
    bool is_there[kAtOnce];
    NWOR_UNROLL
    for (int64_t i = 0; i < kAtOnce; ++i) {
      const Column from = first + i < count ? column_of(first + i) : Column{-1, 0};
      is_there[i] = from.block >= 0;
      for (int64_t w = 0; is_there[i] && w < kWords; ++w) {
        words[i][w] = state_word(state, from.block, from.column, team.lane() + w);
      }
    }
    NWOR_UNROLL
    for (int64_t i = 0; i < kAtOnce; ++i) {
      if (is_there[i]) {
        Sample<Team> sample;
        team.sum_parts(sample.parts, [&](int64_t word) {
          return checksum_of(words[i][word % kWords], word);
        });
        visit(first + i, sample);
      }
    }
  }
}

// By a warp; all lanes get it.
template <typename Team>
NWOR_RULE Sample<Team> sample_of(Team& team, const State& state, int64_t block,
                                 int64_t column) {
  Sample<Team> sample;
  team.sum_parts(sample.parts, [&](int64_t word) {
    return checksum_of(state_word(state, block, column, word), word);
  });
  return sample;
}

// What is read of a convolution's buffer from column `offset` on. samples: of its
// columns.
NWOR_RULE uint64_t window_at(const State& state, int64_t offset,
                             const uint64_t* samples) {
  uint64_t sum = 0;
  for (int64_t c = 0; c < state.window; ++c) {
    sum += mix64(samples[offset + c] + static_cast<uint64_t>(c + 1));
  }
  return sum;
}

// By a warp: the sample of what is read from the first column of `block`.
template <typename Team>
NWOR_RULE uint64_t read_at(Team& team, const State& state, int64_t block) {
  if (state.is_temporal()) {
    return sample_of(team, state, block, 0).whole(team);
  }
  uint64_t samples[kMaxBuffer];
  for (int64_t c = 0; c < state.window; ++c) {
    samples[c] = sample_of(team, state, block, c).whole(team);
  }
  return window_at(state, 0, samples);
}

struct StatesPass : StatesArgs {
  int64_t num_parts;  // teams of a request

  // A request's place in a group's metadata.
  struct Place {
    bool is_window;
    bool has_state;  // whether the kernels read one
    int64_t offset;  // column that is read
    int64_t index;   // of it among the windows, or among the others
    bool is_run;     // by the kernels of this step
  };

  template <typename Team>
  NWOR_RULE Place place_of(Team& team, const StateMetadata& of,
                           const Rows& rows) const {
    const int64_t r = rows.request;
    int64_t num_windows = least(r, of.num_windows);
    bool is_window = r < of.num_windows;
    if (of.is_window != nullptr) {
      num_windows = 0;
      for (int64_t i = team.index(); i < r; i += team.size()) {
        num_windows += of.is_window[i];
      }
      num_windows = static_cast<int64_t>(team.sum(num_windows).total);
      is_window = of.is_window[r];
    }
    if (is_window) {
      const int64_t num_accepted =
          of.num_accepted == nullptr ? 1 : of.num_accepted[num_windows];
      const bool is_there = num_accepted >= 1 && num_accepted <= max_columns;
      return {true, is_there, is_there ? num_accepted - 1 : 0, num_windows, true};
    }
    const int64_t index = r - num_windows;
    bool has = true;
    if (index >= of.num_decodes && of.has_state != nullptr) {
      has = of.has_state[index] != 0;
    } else if (index >= of.num_decodes && of.seq_lens != nullptr) {
      has = of.seq_lens[r] > rows.end - rows.begin;
    }
    return {false, has, 0, index, !of.only_decodes || index < of.num_decodes};
  }

  // Of each request: begin(rows) by each of its teams; judge(rows, places, what begin
  // returned, s) by a warp, for each state; finish(rows, places, what begin returned,
  // verdicts) by one team, when all states have a verdict. verdicts: [num_states], in
  // the team's room.
  template <typename Team, typename Begin, typename Judge, typename Finish>
  NWOR_RULE void each_state(Team& team, const Begin& begin, const Judge& judge,
                            const Finish& finish) const {
    each_part(team, *this, num_parts, [&](const Rows& rows, int64_t part) {
      if (rows.begin == rows.end) {
        return;
      }
      Place places[kMaxStateGroups];
      for (int64_t g = 0; g < num_groups; ++g) {
        places[g] = place_of(team, metadata[g], rows);
      }
      const int64_t begun = begin(rows);
      Verdict* const found = verdicts + rows.request * num_states;
      const int64_t end = num_states * (part + 1) / num_parts;
      for (int64_t s = num_states * part / num_parts + team.warp(); s < end;
           s += team.num_warps()) {
        const Verdict verdict = judge(rows, places, begun, s);
        if (team.lane() == 0) {
          found[s] = verdict;
        }
      }
      team.sync();
      if (team.is_last_of(num_parts, tickets[rows.request])) {
        constexpr auto kWords = static_cast<int64_t>(sizeof(Verdict) / sizeof(int64_t));
        static_assert(kMaxStates * kWords <= kMaxReqs, "a team has so much room");
        int64_t* const room = team.room(num_states * kWords);
        const auto* const words = reinterpret_cast<const int64_t*>(found);
        for (int64_t i = team.index(); i < num_states * kWords; i += team.size()) {
          room[i] = team.load(words + i);
        }
        team.sync();
        finish(rows, places, begun, reinterpret_cast<const Verdict*>(room));
      }
      team.sync();
    });
  }

  // Whether any state has a verdict.
  template <typename Team>
  NWOR_RULE bool is_any(Team& team, const Verdict* of) const {
    uint64_t number = 0;
    for (int64_t s = team.index(); s < num_states; s += team.size()) {
      number += of[s].kind >= 0;
    }
    return team.sum(number).total > 0;
  }

  // The block with a request's column number `column`, or -1.
  NWOR_RULE int64_t block_of(const StateMetadata& of, const Place& place,
                             int64_t column) const {
    int64_t block = -1;
    if (place.is_window) {
      block = of.window_blocks[place.index * of.window_stride + column];
    } else if (of.blocks != nullptr) {
      block = of.blocks[place.index * of.block_stride];
    }
    return block > 0 && block < num_state_blocks ? block : -1;
  }

  // The block of a request that ends at position `end`; 0: the null block, -1: not
  // known. end > 0; of a text that ends inside a block, its last one.
  NWOR_RULE int64_t block_before(int64_t g, int64_t r, int64_t end) const {
    const StateBlocks& of = state_blocks[g];
    const int64_t number = (end - 1) / boundary_tokens;
    if (of.blocks == nullptr || number >= of.width) {
      return -1;
    }
    const int64_t block = of.blocks[r * of.stride + number];
    return block < num_state_blocks ? block : -1;
  }

  // What a step leaves in a block for those who find it there: column `column`, a state
  // of `length` tokens. length 0: nothing.
  struct Held {
    int64_t block;
    int64_t column;
    int64_t length;
  };

  // One state is left where it is. Of a window whose kept tokens pass the end of a
  // block, vLLM copies the state of there after sampling. With blocks of 4, a window
  // from position 2 of which 3 are kept passes 4: its column 1, to the first block.
  NWOR_RULE Held held_by(const Rows& rows, int64_t g, const Place& place,
                         int64_t num_kept) const {
    if (boundary_tokens == 0) {
      return {-1, 0, 0};
    }
    const int64_t start = plan[rows.begin].position;
    if (!place.is_window) {
      return {block_of(metadata[g], place, 0), 0, start + rows.end - rows.begin};
    }
    const int64_t end = (start + num_kept) / boundary_tokens * boundary_tokens;
    if (end <= start) {
      return {-1, 0, 0};
    }
    return {block_before(g, rows.request, end), end - start - 1, end};
  }

  // The block with the state of `start` tokens that a request found in the prefix
  // cache. -1: not known, or a KV connector may have filled it.
  NWOR_RULE int64_t source_of(const Rows& rows, int64_t g, int64_t start) const {
    const bool is_ours = boundary_tokens > 0 && seats[rows.seat].loads != kUnknownLoads;
    return is_ours ? block_before(g, rows.request, start) : -1;
  }

  // Reports this team's verdicts: one finding for each class, and kind of state.
  // `block`, `column`: of the first state concerned.
  NWOR_RULE void report_verdicts(const Verdict* of_states, const Place* places,
                                 const Rows& rows, int64_t position,
                                 int64_t expected_length) const {
    for (int64_t first = 0; first < num_states; ++first) {
      const Verdict& of = of_states[first];
      if (of.kind < 0) {
        continue;
      }
      int64_t number = 0;
      bool is_first = true;
      for (int64_t s = 0; s < num_states; ++s) {
        if (of_states[s].kind == of.kind && states[s].is_like(states[first])) {
          ++number;
          is_first = is_first && s >= first;
        }
      }
      if (!is_first) {
        continue;
      }
      const Place& place = places[states[first].group];
      const int64_t g = states[first].group, owner = seats[rows.seat].generation;
      if (of.boundary > 0) {
        // The host knows layers of this class by their columns of `contents`.
        const int64_t layer = first + (of.kind == kNeverLoaded ? num_columns : 0);
        report(*this, {step, of.kind, owner, of.boundary - 1,
                       block_before(g, rows.request, of.boundary), layer, number,
                       of.generation, of.step, of.boundary, of.length});
        continue;
      }
      const int64_t column = states[first].is_temporal() ? place.offset : 0;
      const int64_t known = block_of(metadata[g], place, column);
      const int64_t block = known < 0 ? 0 : known;
      const bool is_ring = states[first].is_ring();
      const int64_t at =
          is_ring ? of.position % states[first].num_columns : place.offset;
      report(*this, {step, of.kind, owner, is_ring ? of.position : position,
                     block | at << 40, first, number, of.generation, of.step,
                     is_ring ? of.position : expected_length, of.length});
    }
  }
};

struct ReadStates : StatesPass {
  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    each_state(
        team, [&](const Rows& rows) { return plan[rows.begin].position; },
        [&](const Rows& rows, const Place* places, int64_t start, int64_t s) {
          return judge(team, rows, s, places[states[s].group], start);
        },
        [&](const Rows& rows, Place* places, int64_t start, const Verdict* of_states) {
          if (is_any(team, of_states) && team.index() == 0) {
            report_verdicts(of_states, places, rows, start, start);
            // What is in its buffers is not what is known to be.
            state_seats[rows.seat].num_buffered = 0;
          }
          if (team.index() == 0) {
            set_last_tokens(rows, places, start);
          }
        });
  }

  NWOR_RULE bool is_known(const Rows& rows, int64_t start) const {
    const StateSeat& seat = state_seats[rows.seat];
    return seat.generation == seats[rows.seat].generation && seat.length == start;
  }

  // vLLM may have copied the state that is read to its block.
  NWOR_RULE void set_last_tokens(const Rows& rows, const Place* places,
                                 int64_t start) const {
    for (int64_t g = 0; g < num_recurrent; ++g) {
      const int64_t block =
          places[g].has_state ? block_of(metadata[g], places[g], places[g].offset) : -1;
      if (block >= 0) {
        last_tokens[g * num_state_blocks + block] =
            is_known(rows, start)
                ? static_cast<int32_t>(state_seats[rows.seat].last_token)
                : kUnknownToken;
      }
    }
  }

  // By a warp: compares the state that is read, and keeps samples of what will be
  // written.
  template <typename Team>
  NWOR_RULE Verdict judge(Team& team, const Rows& rows, int64_t s, const Place& place,
                          int64_t start) const {
    const State& state = states[s];
    if (state.is_ring()) {
      return judge_ring(team, rows, s, place, start);
    }
    const StateMetadata& of = metadata[state.group];
    uint64_t* const kept = scratch_of(rows.request, s);
    const int64_t block = block_of(of, place, state.is_temporal() ? place.offset : 0);
    uint64_t found = 0;
    if (state.is_temporal()) {
      // Those that will be written, then the one that is read.
      const int64_t count =
          place.is_window ? least(rows.end - rows.begin, max_columns) : 1;
      each_sample(
          team, state, count + 1,
          [&](int64_t c) {
            return Column{c < count ? block_of(of, place, c) : block, 0};
          },
          [&](int64_t c, const Sample<Team>& sample) {
            if (c == count) {
              found = sample.whole(team);
            } else {
              sample.store(team, parts_of(kept, c));
            }
          });
    } else if (block >= 0) {
      each_sample(
          team, state, state.num_columns, [&](int64_t c) { return Column{block, c}; },
          [&](int64_t c, const Sample<Team>& sample) {
            const uint64_t whole = sample.whole(team);
            if (team.lane() == 0) {
              kept[c] = whole;
            }
          });
      team.warp_sync();
      found = window_at(state, place.offset, kept);
    }
    if (start == 0) {
      return {place.has_state ? int64_t{kNoStateYet} : -1, 0, -1, 0};
    }
    if (!place.has_state || block < 0) {
      return {kStateLost, 0, -1, 0};
    }
    if (!is_known(rows, start)) {
      return judge_hit(team, rows, s, start, found);
    }
    if (team.lane() == 0) {
      count(totals[0]);
    }
    if (found != wanted[rows.seat * num_states + s]) {
      return whose(team, rows.seat, s, found);
    }
    return judge_boundary(team, rows, s);
  }

  // By a warp: a request that has not run before reads a state of `start` tokens.
  template <typename Team>
  NWOR_RULE Verdict judge_hit(Team& team, const Rows& rows, int64_t s, int64_t start,
                              uint64_t found) const {
    const State& state = states[s];
    const Seat& seat = seats[rows.seat];
    const int64_t source = source_of(rows, state.group, start);
    if (source == 0 && seat.loads == kNoLoads) {
      return {kStateLost, 0, -1, 0, start};
    }
    const bool is_recorded = source > 0 && state_records[source].is_known();
    if (team.lane() == 0) {
      count(totals[is_recorded ? 0 : 1]);
      if (!is_recorded && seat.loads != kNoLoads) {
        count(header->num_unverified);
      }
    }
    if (!is_recorded) {
      return source > 0 ? judge_unknown(team, s, seat, source, start, found)
                        : Verdict{-1, 0, 0, 0};
    }
    const StateRecord& record = state_records[source];
    if (!seat.opaque && !record.opaque && record.hash != seat.hash) {
      return {kForeignState, record.generation, record.length, record.step, start};
    }
    const uint64_t recorded = boundary_of(source, s);
    if (found == recorded) {
      return {-1, 0, 0, 0};
    }
    const bool is_source = read_at(team, state, source) != recorded;
    return {kChangedState, record.generation, -1, record.step, is_source ? start : 0};
  }

  // By a warp: `source` has a state that is not known. A load must have changed one of
  // a text with another last token, and what is read is a copy.
  template <typename Team>
  NWOR_RULE Verdict judge_unknown(Team& team, int64_t s, const Seat& seat,
                                  int64_t source, int64_t start, uint64_t found) const {
    const State& state = states[s];
    const StateRecord& before = state_records[source];
    const uint64_t there = read_at(team, state, source);
    const bool is_same = there == boundary_of(source, s);
    team.warp_sync();
    if (team.lane() == 0) {
      boundary_of(source, s) = there;  // for later hits: adopt_boundary
    }
    if (is_same && before.generation != 0 && before.opaque == kLoadedState &&
        !seat.opaque && before.last_token >= 0 &&
        before.last_token != seat.last_of_hit) {
      return {kNeverLoaded, before.generation, before.length, before.step, start};
    }
    return {found == there ? int64_t{-1} : int64_t{kChangedState}, 0, -1, 0};
  }

  // By a warp: whether the boundary that the request's last step passed was written. By
  // now its block may be another's.
  template <typename Team>
  NWOR_RULE Verdict judge_boundary(Team& team, const Rows& rows, int64_t s) const {
    const State& state = states[s];
    const StateSeat& seat = state_seats[rows.seat];
    const int64_t generation = seats[rows.seat].generation;
    const int64_t to =
        seat.boundary > 0 ? block_before(state.group, rows.request, seat.boundary) : -1;
    if (to <= 0 || owners[to] != -generation ||
        read_at(team, state, to) == boundary_of(to, s)) {
      return {-1, 0, 0, 0};
    }
    return {kStateNotWritten, generation, -1, seat.step, seat.boundary};
  }

  // By a warp: compares the rows of earlier steps that this one reads. It reads them
  // only if it has the group's last token.
  template <typename Team>
  NWOR_RULE Verdict judge_ring(Team& team, const Rows& rows, int64_t s,
                               const Place& place, int64_t start) const {
    const State& state = states[s];
    const int64_t first = start - start % state.ratio;
    const int64_t end = start + rows.end - rows.begin;
    const int64_t block = block_of(metadata[state.group], place, 0);
    if (first == start || end < first + state.ratio || block < 0) {
      return {-1, 0, 0, 0};
    }
    const StateSeat& seat = state_seats[rows.seat];
    const bool is_known = seat.generation == seats[rows.seat].generation &&
                          seat.length == start && seat.first_row <= first;
    if (team.lane() == 0) {
      count(totals[is_known ? 0 : 1]);
    }
    for (int64_t p = first; is_known && p < start; ++p) {
      const int64_t row = p % state.num_columns;
      if (sample_of(team, state, block, row).whole(team) !=
          columns_of(rows.seat, s)[p % state.ratio]) {
        // The request's own last write to the row, if that was for another position.
        const int64_t last =
            seat.end_row - 1 - (seat.end_row - 1 - p) % state.num_columns;
        if (last > p) {
          return {kRingOverwritten, seat.generation, last, seat.end_step, 0, p};
        }
        return {kRingOverwritten, 0, -1, 0, 0, p};
      }
    }
    return {-1, 0, 0, 0};
  }

  // By a warp: who wrote a state with this sample.
  template <typename Team>
  NWOR_RULE Verdict whose(Team& team, int64_t own, int64_t s, uint64_t found) const {
    const int64_t end = num_seats * max_columns;
    for (int64_t pass = 0; pass < 2; ++pass) {  // first its own
      for (int64_t first = 0; first < end; first += team.num_lanes()) {
        const int64_t i = first + team.lane();
        const int64_t seat = i / max_columns, c = i % max_columns;
        bool is = i < end && (seat == own) == (pass == 0);
        if (is) {
          const StateSeat& of = state_seats[seat];
          is = of.generation != 0 && c < of.num_columns &&
               columns_of(seat, s)[c] == found;
        }
        const int64_t lane = team.first_lane(is);
        if (lane >= 0) {
          const int64_t at = first + lane;
          const StateSeat& of = state_seats[at / max_columns];
          return {int64_t{pass == 0 ? kStaleState : kForeignState}, of.generation,
                  of.first_length + at % max_columns, of.step};
        }
      }
    }
    return {kChangedState, 0, -1, 0};
  }
};

struct WrittenStates : StatesPass {
  const int32_t* cu_num_logits;
  Acceptance acceptance;
  int64_t* digests_to;

  WrittenStates(const AuditStatesWrittenArgs& args, int64_t num_parts)
      : StatesPass{args, num_parts},
        cu_num_logits(args.cu_num_logits),
        acceptance(args.acceptance),
        digests_to(args.digests_to) {}

  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    each_state(
        team,
        [&](const Rows& rows) {
          // A window keeps its first token in any case.
          const int64_t num_kept = num_kept_of(team, *this, rows);
          return num_kept < 1 ? int64_t{1} : num_kept;
        },
        [&](const Rows& rows, const Place* places, int64_t num_kept, int64_t s) {
          return judge(team, rows, s, places[states[s].group], num_kept);
        },
        [&](const Rows& rows, Place* places, int64_t num_kept,
            const Verdict* of_states) {
          const int64_t length = plan[rows.begin].position + num_kept;
          if (is_any(team, of_states) && team.index() == 0) {
            for (int64_t g = 0; g < num_groups; ++g) {
              places[g].offset =
                  places[g].is_window ? least(num_kept, max_columns) - 1 : 0;
            }
            report_verdicts(of_states, places, rows, length - 1, length);
          }
          team.sync();
          remember_tokens(team, rows, places);
          for (int64_t g = 0; digests_to != nullptr && g < num_recurrent; ++g) {
            send_digests(team, rows, g, places[g], num_kept);
          }
          remember(team, rows, places, num_kept);
        });
  }

  // By a warp.
  template <typename Team>
  NWOR_RULE Verdict judge(Team& team, const Rows& rows, int64_t s, const Place& place,
                          int64_t num_kept) const {
    if (states[s].is_ring()) {
      record_ring(team, rows, s, place, num_kept);
      return {-1, 0, 0, 0};
    }
    const int64_t q = rows.end - rows.begin, start = plan[rows.begin].position;
    const int64_t generation = seats[rows.seat].generation;
    if (record(team, rows, s, place, num_kept) || !place.is_run) {
      return {kStateNotWritten, generation, -1, step};
    }
    if (!place.is_window && num_kept < q) {
      return {kStateAhead, generation, start + q, step};
    }
    return {-1, 0, 0, 0};
  }

  // By a warp: what the request reads next. Returns whether the state was not written.
  template <typename Team>
  NWOR_RULE bool record(Team& team, const Rows& rows, int64_t s, const Place& place,
                        int64_t num_kept) const {
    const State& state = states[s];
    const StateMetadata& of = metadata[state.group];
    uint64_t* const before = scratch_of(rows.request, s);
    const int64_t q = rows.end - rows.begin;
    const int64_t kept = place.is_window ? least(num_kept, max_columns) - 1 : 0;
    const int32_t token =
        plan[place.is_window ? rows.begin + kept : rows.end - 1].token;
    const StateSeat& seat = state_seats[rows.seat];
    const int64_t count = place.is_window ? least(q, max_columns) : 1;
    uint64_t* const written_to = columns_of(rows.seat, s);
    bool is_same = false;
    if (state.is_temporal()) {
      each_sample(
          team, state, count,
          [&](int64_t c) { return Column{block_of(of, place, c), 0}; },
          [&](int64_t c, const Sample<Team>& sample) {
            const uint64_t whole = sample.whole(team);
            if (team.lane() == 0) {
              written_to[c] = whole;
            }
            if (c == kept) {
              is_same = is_unwritten(team, state, block_of(of, place, c), token,
                                     parts_of(before, c), sample);
            }
          });
    } else if (const int64_t block = block_of(of, place, 0); block >= 0) {
      uint64_t samples[kMaxBuffer];
      const int64_t end = least(state.window + count - 1, state.num_columns);
      each_sample(
          team, state, end, [&](int64_t c) { return Column{block, c}; },
          [&](int64_t c, const Sample<Team>& sample) {
            samples[c] = sample.whole(team);
          });
      for (int64_t c = team.lane(); c + state.window <= end; c += team.num_lanes()) {
        written_to[c] = window_at(state, c, samples);
      }
      const bool is_known = seat.generation == seats[rows.seat].generation &&
                            seat.length == plan[rows.begin].position;
      const int64_t newest = kept + state.window - 1;
      // A copy of the buffer begins with the first column that is read.
      const int64_t shift = seat.first_read - place.offset;
      for (int64_t c = 0; is_known && newest < end && c < state.num_columns; ++c) {
        const int64_t at = c + shift;
        is_same = is_same || (at >= 0 && at < seat.num_buffered &&
                              seat.buffered[at] >= 0 && before[c] == samples[newest]);
      }
      for (int64_t c = 0; is_known && c < seat.num_buffered; ++c) {
        is_same = is_same && seat.buffered[c] != token;
      }
    }
    const Held held = held_by(rows, state.group, place, num_kept);
    team.warp_sync();
    if (team.lane() == 0) {
      wanted[rows.seat * num_states + s] = written_to[kept];
      if (held.block > 0) {
        boundary_of(held.block, s) = written_to[held.column];
      }
    }
    return is_same;
  }

  // By a warp: the rows that the step adds to the open group.
  template <typename Team>
  NWOR_RULE void record_ring(Team& team, const Rows& rows, int64_t s,
                             const Place& place, int64_t num_kept) const {
    const State& state = states[s];
    const int64_t start = plan[rows.begin].position;
    const int64_t end = start + rows.end - rows.begin, length = start + num_kept;
    const int64_t block = block_of(metadata[state.group], place, 0);
    const int64_t first = length - length % state.ratio;
    for (int64_t p = first < start ? start : first; block >= 0 && p < length; ++p) {
      const uint64_t sample =
          sample_of(team, state, block, p % state.num_columns).whole(team);
      if (team.lane() == 0) {
        // A draft of the same step may have the row by now: then nothing is right.
        columns_of(rows.seat, s)[p % state.ratio] =
            p + state.num_columns < end ? ~sample : sample;
      }
    }
  }

  // By a warp: whether a temporal state is as before a token that is another one.
  template <typename Team>
  NWOR_RULE bool is_unwritten(Team& team, const State& state, int64_t block,
                              int32_t token, const uint32_t* before,
                              const Sample<Team>& sample) const {
    Sample<Team> zero;
    team.sum_parts(zero.parts, [](int64_t word) { return checksum_of(0, word); });
    const int32_t last = last_tokens[state.group * num_state_blocks + block];
    const bool is_other = last == kNoToken || (last >= 0 && last != token);
    return is_other && sample.num_same(team, before, zero) >= state.same_parts;
  }

  // The tokens that are in the blocks of the columns now.
  template <typename Team>
  NWOR_RULE void remember_tokens(Team& team, const Rows& rows,
                                 const Place* places) const {
    for (int64_t i = team.index(); i < num_recurrent * max_columns; i += team.size()) {
      const int64_t g = i / max_columns, c = i % max_columns;
      const int64_t row = places[g].is_window ? rows.begin + c : rows.end - 1;
      const bool is_there = row < rows.end && (places[g].is_window || c == 0);
      const int64_t block = is_there ? block_of(metadata[g], places[g], c) : -1;
      if (block >= 0) {
        last_tokens[g * num_state_blocks + block] = plan[row].token;
      }
    }
  }

  // What the host compares by text: the state of a text up to a block's end that the
  // step has left, and one that a KV connector has loaded.
  template <typename Team>
  NWOR_RULE void send_digests(Team& team, const Rows& rows, int64_t g,
                              const Place& place, int64_t num_kept) const {
    const int64_t start = plan[rows.begin].position;
    const Seat& seat = seats[rows.seat];
    const Held held = held_by(rows, g, place, num_kept);
    if (held.block > 0 && held.length % boundary_tokens == 0) {
      const PlanRow& last = plan[rows.begin + held.length - start - 1];
      const uint64_t hash = seat.opaque ? 0 : last.hash;
      send_digest(team, rows, g, 0,
                  {hash, held.block, held.length - 1, seat.generation, 0, kComputed,
                   static_cast<uint64_t>(last.token < 0 ? -1 : last.token), step});
    }
    const StateSeat& before = state_seats[rows.seat];
    const bool is_hit = before.generation != seat.generation || before.length != start;
    const int64_t source = is_hit && start > 0 ? source_of(rows, g, start) : -1;
    if (source > 0 && !seat.opaque && state_records[source].opaque == kLoadedState) {
      send_digest(team, rows, g, 1,
                  {seat.hash, source, start - 1, seat.generation, 1, kLoaded,
                   static_cast<uint64_t>(seat.last_of_hit), step});
    }
  }

  template <typename Team>
  NWOR_RULE void send_digest(Team& team, const Rows& rows, int64_t g, int64_t is_loaded,
                             const BlockDigest& digest) const {
    constexpr int64_t kHead = sizeof(BlockDigest) / sizeof(int64_t);
    const int64_t row = (is_loaded * num_seats + rows.request) * num_recurrent + g;
    int64_t* const to = digests_to + row * (kHead + max_in_group);
    if (team.index() == 0) {
      *reinterpret_cast<BlockDigest*>(to) = digest;
    }
    for (int64_t s = team.index(); s < num_states; s += team.size()) {
      if (states[s].group == g) {
        to[kHead + states[s].in_group] =
            static_cast<int64_t>(team.load(&boundary_of(digest.block, s)));
      }
    }
  }

  // The tokens that are in the states now.
  template <typename Team>
  NWOR_RULE void remember(Team& team, const Rows& rows, const Place* places,
                          int64_t num_kept) const {
    const int64_t q = rows.end - rows.begin, start = plan[rows.begin].position;
    StateSeat& seat = state_seats[rows.seat];
    const bool is_known =
        seat.generation == seats[rows.seat].generation && seat.length == start;
    const bool is_window = num_recurrent > 0 && places[0].is_window;
    // The last `width` inputs before the step, then those of the step.
    const int64_t width = conv_window, num_inputs = width + least(q, kMaxBuffer);
    const int64_t num_left = is_window ? least(num_inputs - 1, kMaxBuffer) : width;
    int64_t* const inputs = team.room(num_left);
    for (int64_t i = team.index(); i < num_left; i += team.size()) {
      const int64_t from = num_inputs - num_left + i, at = seat.first_read + from;
      if (from >= width) {
        inputs[i] = plan[rows.end - num_inputs + from].token;
      } else {
        inputs[i] = is_known && at < seat.num_buffered ? seat.buffered[at] : -1;
      }
    }
    team.sync();
    for (int64_t i = team.index(); i < num_left; i += team.size()) {
      seat.buffered[i] = static_cast<int32_t>(inputs[i]);
    }
    for (int64_t g = team.index(); g < num_recurrent; g += team.size()) {
      if (!is_known && start > 0) {
        adopt_boundary(rows, g, start);
      }
      remember_boundary(rows, g, places[g], num_kept);
    }
    if (team.index() > 0) {
      return;
    }
    seat.num_buffered = num_left;
    seat.first_read = is_window ? num_kept - 1 : 0;
    if (!is_known) {
      seat.first_row = start;
    }
    if (!is_known || seat.end_row < start + q) {
      seat.end_row = start + q;
      seat.end_step = step;
    }
    seat.generation = seats[rows.seat].generation;
    seat.length = start + num_kept;
    seat.first_length = is_window ? start + 1 : start + q;
    seat.num_columns = is_window ? least(q, max_columns) : 1;
    seat.step = step;
    seat.last_token = plan[is_window ? rows.begin + num_kept - 1 : rows.end - 1].token;
    const Held held = held_by(rows, 0, places[0], num_kept);
    seat.boundary = is_window && held.block > 0 ? held.length : 0;
  }

  NWOR_RULE static StateRecord record_of(const Seat& seat, uint64_t hash,
                                         int64_t length, int64_t step, int64_t last) {
    return {hash,
            static_cast<int32_t>(seat.generation),
            static_cast<int32_t>(length),
            static_cast<int32_t>(step),
            static_cast<int32_t>(seat.opaque),
            seat.opaque || last < 0 ? -1 : static_cast<int32_t>(last),
            0};
  }

  // By one thread: a state of unknown origin that a request found counts as that of its
  // text from then on.
  NWOR_RULE void adopt_boundary(const Rows& rows, int64_t g, int64_t start) const {
    const int64_t source = source_of(rows, g, start);
    const Seat& seat = seats[rows.seat];
    if (source > 0 && !state_records[source].is_known()) {
      state_records[source] = record_of(seat, seat.hash, start, step, seat.last_of_hit);
    }
  }

  // By one thread: which text a block of group g stands for now.
  NWOR_RULE void remember_boundary(const Rows& rows, int64_t g, const Place& place,
                                   int64_t num_kept) const {
    const int64_t start = plan[rows.begin].position;
    const Held held = held_by(rows, g, place, num_kept);
    if (held.block <= 0) {
      return;
    }
    const Seat& seat = seats[rows.seat];
    const PlanRow& last = plan[rows.begin + held.length - start - 1];
    state_records[held.block] =
        record_of(seat, last.hash, held.length, step, last.token);
    last_tokens[g * num_state_blocks + held.block] = last.token;
    // Some layers also write a state from inside a chunk, to the block before.
    const int64_t before = (held.length - 1) / boundary_tokens * boundary_tokens;
    const int64_t inner =
        !place.is_window && before > start ? block_before(g, rows.request, before) : 0;
    if (inner > 0) {
      state_records[inner].generation = state_records[inner].opaque = 0;
    }
  }
};

template <typename Device>
void call(const Device& device, const AuditStatesReadArgs& args) {
  device.check(args);
  const int64_t num_parts = device.num_parts(args.num_states);
  device.run(ReadStates{{args, num_parts}}, args.num_reqs * num_parts);
}

template <typename Device>
void call(const Device& device, const AuditStatesWrittenArgs& args) {
  device.check(args);
  const int64_t num_parts = device.num_parts(args.num_states);
  // vLLM copies states of the prefix cache after sampling.
  const bool is_beside = args.is_all_beside && args.boundary_tokens == 0;
  const Device to = is_beside ? device.beside(args) : device;
  to.run(WrittenStates(args, num_parts), args.num_reqs * num_parts);
}

}  // namespace nwor
