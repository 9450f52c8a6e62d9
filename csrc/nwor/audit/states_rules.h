// SPDX-License-Identifier: Apache-2.0
//
// The passes over recurrent states, for the CPU and for CUDA, by the teams of
// audit_rules.h: a team a request, a warp of it a state.
//
// A state is recognized by its content, not by its block: vLLM copies blocks, and the
// metadata of its kernels says which one a step reads. What the accepted token's column
// holds after the step is what the request must find in the next one.
//
// "Not written" is concluded from equal samples only if the token is another one than
// the block's states had last (temporal), or than all those in the buffer
// (convolution): the same token again may give the same bits.
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

// What is kept of a sample: a sum for each of its parts.
struct Sample {
  uint32_t parts[kSampleParts];

  NWOR_RULE uint64_t whole() const {
    uint64_t sum = 0;
    for (int64_t p = 0; p < kSampleParts; ++p) {
      sum += mix64(parts[p] + (static_cast<uint64_t>(p) + 1) * 0x9E3779B97F4A7C15ULL);
    }
    return sum;
  }
  NWOR_RULE bool shares_a_part(const Sample& other) const {
    bool shares = false;
    for (int64_t p = 0; p < kSampleParts; ++p) {
      shares = shares || parts[p] == other.parts[p];
    }
    return shares;
  }
};
static_assert(sizeof(Sample) == 4 * sizeof(uint64_t), "of a column in scratch");

// By a warp; all lanes get it.
template <typename Team>
NWOR_RULE Sample sample_of(Team& team, const State& state, int64_t block,
                           int64_t column) {
  Sample sample;
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

// What is found out about one state of a request, in the team's room.
struct Verdict {
  int64_t kind;  // FindingClass, -1: nothing
  int64_t generation;
  int64_t length;
  int64_t step;
  int64_t position = 0;  // of a ring: whose row is lost
};

struct StatesPass : StatesArgs {
  // A request's place in a group's metadata.
  struct Place {
    bool is_window;
    bool has_state;  // whether the kernels read one
    int64_t offset;  // column that is read
    int64_t index;   // of it among the windows, or among the others
  };

  template <typename Team>
  NWOR_RULE Place place_of(Team& team, const StateMetadata& of, int64_t r) const {
    int64_t num_windows = 0;
    if (of.is_window != nullptr) {
      for (int64_t i = team.index(); i < r; i += team.size()) {
        num_windows += of.is_window[i];
      }
      num_windows = static_cast<int64_t>(team.sum(num_windows).total);
    }
    if (of.is_window != nullptr && of.is_window[r]) {
      const int64_t num_accepted = of.num_accepted[num_windows];
      const bool is_there = num_accepted >= 1 && num_accepted <= max_columns;
      return {true, is_there, num_accepted - 1, num_windows};
    }
    const int64_t index = r - num_windows;
    const bool has =
        of.has_state == nullptr || index < of.num_decodes || of.has_state[index] != 0;
    return {false, has, 0, index};
  }

  // A request's place in each group. Returns the team's room for verdicts, one for each
  // state.
  template <typename Team>
  NWOR_RULE Verdict* find(Team& team, const Rows& rows, Place* places) const {
    for (int64_t g = 0; g < num_groups; ++g) {
      places[g] = place_of(team, metadata[g], rows.request);
    }
    constexpr auto kWords = static_cast<int64_t>(sizeof(Verdict) / sizeof(int64_t));
    return reinterpret_cast<Verdict*>(team.room(num_states * kWords));
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

  // Reports this team's verdicts: one finding for each class, and kind of state.
  // `block`, `column`: of the first state concerned.
  NWOR_RULE void report_verdicts(const Verdict* verdicts, const Place* places,
                                 const Rows& rows, int64_t position,
                                 int64_t expected_length) const {
    for (int64_t first = 0; first < num_states; ++first) {
      const Verdict& of = verdicts[first];
      if (of.kind < 0) {
        continue;
      }
      int64_t number = 0;
      bool is_first = true;
      for (int64_t s = 0; s < num_states; ++s) {
        if (verdicts[s].kind == of.kind && states[s].is_like(states[first])) {
          ++number;
          is_first = is_first && s >= first;
        }
      }
      if (!is_first) {
        continue;
      }
      const Place& place = places[states[first].group];
      const int64_t column = states[first].is_temporal() ? place.offset : 0;
      const int64_t block = block_of(metadata[states[first].group], place, column);
      const bool is_ring = states[first].is_ring();
      const int64_t at =
          is_ring ? of.position % states[first].num_columns : place.offset;
      report(*this, {step, of.kind, seats[rows.seat].generation,
                     is_ring ? of.position : position, block | at << 40, first, number,
                     of.generation, of.step, is_ring ? of.position : expected_length,
                     of.length});
    }
  }
};

struct ReadStates : StatesPass {
  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    each_request(team, *this, [&](const Rows& rows) {
      if (rows.begin == rows.end) {
        return;
      }
      Place places[kMaxStateGroups];
      Verdict* const verdicts = find(team, rows, places);
      const int64_t start = plan[rows.begin].position;
      uint64_t num_found = 0;
      for (int64_t s = team.warp(); s < num_states; s += team.num_warps()) {
        const Verdict verdict = judge(team, rows, s, places[states[s].group], start);
        if (team.lane() == 0) {
          verdicts[s] = verdict;
          num_found += verdict.kind >= 0;
        }
      }
      if (team.sum(num_found).total > 0 && team.index() == 0) {
        report_verdicts(verdicts, places, rows, start, start);
      }
      team.sync();
    });
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
    const int64_t block =
        place.has_state || !place.is_window
            ? block_of(of, place, state.is_temporal() ? place.offset : 0)
            : -1;
    uint64_t found = 0;
    if (state.is_temporal()) {
      if (block >= 0) {
        found = sample_of(team, state, block, 0).whole();
      }
      const int64_t count =
          place.is_window ? least(rows.end - rows.begin, max_columns) : 1;
      for (int64_t c = 0; c < count; ++c) {
        const int64_t to = block_of(of, place, c);
        if (to >= 0) {
          const Sample sample = sample_of(team, state, to, 0);
          if (team.lane() == 0) {
            reinterpret_cast<Sample*>(kept)[c] = sample;
          }
        }
      }
    } else if (block >= 0) {
      for (int64_t c = 0; c < state.num_columns; ++c) {
        const uint64_t sample = sample_of(team, state, block, c).whole();
        if (team.lane() == 0) {
          kept[c] = sample;
        }
      }
      team.warp_sync();
      found = window_at(state, place.offset, kept);
    }
    const StateSeat& of_seat = state_seats[rows.seat];
    const Seat& seat = seats[rows.seat];
    if (start == 0) {
      return {place.has_state ? int64_t{kNoStateYet} : -1, 0, -1, 0};
    }
    if (!place.has_state) {
      return {kStateLost, 0, -1, 0};
    }
    const bool is_known =
        of_seat.generation == seat.generation && of_seat.length == start;
    if (team.lane() == 0) {
      count(totals[is_known ? 0 : 1]);
    }
    const uint64_t next = wanted[rows.seat * num_states + s];
    if (!is_known || block < 0 || found == next) {
      return {-1, 0, 0, 0};
    }
    return whose(team, rows.seat, s, found);
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
      if (sample_of(team, state, block, row).whole() !=
          columns_of(rows.seat, s)[p % state.ratio]) {
        // The request's own last write to the row, if that was for another position.
        const int64_t last =
            seat.end_row - 1 - (seat.end_row - 1 - p) % state.num_columns;
        if (last > p) {
          return {kRingOverwritten, seat.generation, last, seat.end_step, p};
        }
        return {kRingOverwritten, 0, -1, 0, p};
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

  explicit WrittenStates(const AuditStatesWrittenArgs& args)
      : StatesPass{args},
        cu_num_logits(args.cu_num_logits),
        acceptance(args.acceptance) {}

  template <typename Team>
  NWOR_RULE void operator()(Team& team) const {
    each_request(team, *this, [&](const Rows& rows) {
      const int64_t q = rows.end - rows.begin;
      if (q == 0) {
        return;
      }
      Place places[kMaxStateGroups];
      Verdict* const verdicts = find(team, rows, places);
      const int64_t in_step = num_kept_of(team, *this, rows);
      // A window keeps its first token in any case.
      const int64_t num_kept = in_step < 1 ? 1 : in_step;
      const int64_t start = plan[rows.begin].position;
      uint64_t num_found = 0;
      for (int64_t s = team.warp(); s < num_states; s += team.num_warps()) {
        if (states[s].is_ring()) {
          record_ring(team, rows, s, places[states[s].group], num_kept);
          if (team.lane() == 0) {
            verdicts[s].kind = -1;
          }
          continue;
        }
        const bool is = record(team, rows, s, places[states[s].group], num_kept);
        if (team.lane() == 0) {
          const Seat& seat = seats[rows.seat];
          verdicts[s] = {is ? int64_t{kStateNotWritten} : -1, seat.generation,
                         start + num_kept, step};
          if (!is && !places[states[s].group].is_window && num_kept < q) {
            verdicts[s] = {kStateAhead, seat.generation, start + q, step};
          }
          num_found += verdicts[s].kind >= 0;
        }
      }
      if (team.sum(num_found).total > 0 && team.index() == 0) {
        for (int64_t g = 0; g < num_groups; ++g) {
          places[g].offset = places[g].is_window ? num_kept - 1 : 0;
        }
        report_verdicts(verdicts, places, rows, start + num_kept - 1, start + num_kept);
      }
      team.sync();
      if (team.index() == 0) {
        remember(rows, places, num_kept);
      }
      team.sync();
    });
  }

  // By a warp: what the request reads next. Returns whether the state was not written.
  template <typename Team>
  NWOR_RULE bool record(Team& team, const Rows& rows, int64_t s, const Place& place,
                        int64_t num_kept) const {
    const State& state = states[s];
    const StateMetadata& of = metadata[state.group];
    const uint64_t* const before = scratch_of(rows.request, s);
    const int64_t q = rows.end - rows.begin;
    const int64_t kept = place.is_window ? least(num_kept, max_columns) - 1 : 0;
    const int32_t token =
        plan[place.is_window ? rows.begin + kept : rows.end - 1].token;
    const StateSeat& seat = state_seats[rows.seat];
    const int64_t count = place.is_window ? least(q, max_columns) : 1;
    uint64_t* const written_to = columns_of(rows.seat, s);
    bool is_same = false;
    if (state.is_temporal()) {
      for (int64_t c = 0; c < count; ++c) {
        const int64_t block = block_of(of, place, c);
        if (block < 0) {
          continue;
        }
        const Sample sample = sample_of(team, state, block, 0);
        if (team.lane() == 0) {
          written_to[c] = sample.whole();
        }
        if (c == kept) {
          const int32_t last = last_tokens[state.group * num_state_blocks + block];
          is_same = last != -1 && last != token &&
                    reinterpret_cast<const Sample*>(before)[c].shares_a_part(sample);
        }
      }
    } else if (const int64_t block = block_of(of, place, 0); block >= 0) {
      uint64_t samples[kMaxBuffer];
      const int64_t end = least(state.window + count - 1, state.num_columns);
      for (int64_t c = 0; c < end; ++c) {
        samples[c] = sample_of(team, state, block, c).whole();
        const int64_t first = c - state.window + 1;
        if (first >= 0 && team.lane() == 0) {
          written_to[first] = window_at(state, first, samples);
        }
      }
      const bool is_known = seat.generation == seats[rows.seat].generation &&
                            seat.length == plan[rows.begin].position;
      const int64_t newest = kept + state.window - 1;
      for (int64_t c = 0; is_known && c < seat.num_buffered; ++c) {
        is_same = is_same || (newest < end && before[c] == samples[newest]);
      }
      for (int64_t c = 0; is_known && c < seat.num_buffered; ++c) {
        is_same = is_same && seat.buffered[c] != token;
      }
    }
    team.warp_sync();
    if (team.lane() == 0) {
      wanted[rows.seat * num_states + s] = written_to[kept];
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
          sample_of(team, state, block, p % state.num_columns).whole();
      if (team.lane() == 0) {
        // A draft of the same step may have the row by now: then nothing is right.
        columns_of(rows.seat, s)[p % state.ratio] =
            p + state.num_columns < end ? ~sample : sample;
      }
    }
  }

  // By one thread: the tokens that are in the states now.
  NWOR_RULE void remember(const Rows& rows, const Place* places,
                          int64_t num_kept) const {
    const int64_t q = rows.end - rows.begin, start = plan[rows.begin].position;
    StateSeat& seat = state_seats[rows.seat];
    const bool is_known =
        seat.generation == seats[rows.seat].generation && seat.length == start;
    for (int64_t g = 0; g < num_groups; ++g) {
      const int64_t count = places[g].is_window ? least(q, max_columns) : 1;
      for (int64_t c = 0; c < count; ++c) {
        const int64_t block = block_of(metadata[g], places[g], c);
        if (block >= 0) {
          last_tokens[g * num_state_blocks + block] =
              plan[places[g].is_window ? rows.begin + c : rows.end - 1].token;
        }
      }
    }
    const bool is_window = num_groups > 0 && places[0].is_window;
    // The last `width` inputs before the step, then those of the step.
    const int64_t width = conv_window;
    int32_t inputs[2 * kMaxBuffer];
    int64_t num_inputs = 0;
    for (int64_t i = 0; i < width; ++i) {
      const int64_t at = seat.first_read + i;
      inputs[num_inputs++] =
          is_known && at < seat.num_buffered ? seat.buffered[at] : -1;
    }
    const int64_t num_new = least(q, kMaxBuffer);
    for (int64_t i = q - num_new; i < q; ++i) {
      inputs[num_inputs++] = plan[rows.begin + i].token;
    }
    const int64_t num_left = is_window ? least(num_inputs - 1, kMaxBuffer) : width;
    for (int64_t i = 0; i < num_left; ++i) {
      seat.buffered[i] = inputs[num_inputs - num_left + i];
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
  }
};

template <typename Device>
void call(const Device& device, const AuditStatesReadArgs& args) {
  device.check(args);
  device.run(ReadStates{{args}}, args.num_reqs);
}

template <typename Device>
void call(const Device& device, const AuditStatesWrittenArgs& args) {
  device.check(args);
  device.run(WrittenStates(args), args.num_reqs);
}

}  // namespace nwor
