// SPDX-License-Identifier: Apache-2.0
//
// The audit of recurrent states: its tables, and the launchers' arguments.
// states_rules.h has the comparisons. It reads states and never writes them.
//
// A layer with recurrent state keeps a few bytes that stand for all tokens before.
// There are two kinds. A *temporal* state is a matrix a head; in a verification window
// the layer writes one for each token, each to a block of its own (a *column* of the
// request's block table), and the next step goes on from that of the last accepted one.
// A *convolution* keeps its last inputs in a buffer of one block, a column for each
// token; after n tokens of a window were kept, the next step reads from column n - 1
// on.
//
// A layer that keeps one entry for `ratio` tokens (a *group* of them) needs the rows of
// the open group until its last token comes. They are in a *ring*: one block a request,
// in which position p has row p % capacity. A step writes the rows of all its drafts,
// so one that is too small loses rows of the open group to drafts that are rejected.
//
// What is compared is a *sample*: kSampleWords words, for temporal states from as many
// heads as there are parts; of a ring, of each row.
//
// Where states are found in the prefix cache, a block keeps that of a text's begin, as
// a rule up to a block's end: a *boundary*. A StateRecord says of which text it is.
//
// vllm/v1/nwor/audit/states.py allocates the tables.
#pragma once

#include "audit/audit.h"

namespace nwor {

constexpr int64_t kSampleWords = 32;
constexpr int64_t kSampleParts = 8;
// Columns of a convolution's buffer, at most, and groups with recurrent state.
constexpr int64_t kMaxBuffer = 32;
constexpr int64_t kMaxStateGroups = 16;
// States of all layers, at most.
constexpr int64_t kMaxStates = 640;
// Of StateTables::last_tokens: the block has no states yet; it may have those of any
// text, or of one that ends inside an image.
constexpr int32_t kNoToken = -1;
constexpr int32_t kUnknownToken = -2;
// StateRecord::opaque: a KV connector was to fill the block since.
constexpr int32_t kLoadedState = 2;

// One state of one layer. A row of `states`, int64 [num_states, 42]; sizes in bytes.
struct State {
  const uint8_t* base;
  int64_t block_stride;
  int64_t group;        // row of StatesArgs::metadata
  int64_t window;       // columns that a convolution reads; 0: another kind
  int64_t ratio;        // tokens of a group; 0: no ring
  int64_t num_columns;  // of the buffer of a convolution; rows of a ring
  int64_t column_stride;
  int64_t word_bytes;  // 2, 4 or 8
  int64_t in_group;    // its number in the group
  // Of a temporal state: parts of a sample, at least, that are as before the step where
  // it was not written.
  int64_t same_parts;
  int64_t offsets[kSampleWords];

  NWOR_HOST_DEVICE bool is_ring() const { return ratio != 0; }
  NWOR_HOST_DEVICE bool is_temporal() const { return window == 0 && !is_ring(); }
  NWOR_HOST_DEVICE bool is_like(const State& other) const {
    return is_temporal() == other.is_temporal() && is_ring() == other.is_ring();
  }
};
constexpr int64_t kStateColumns = sizeof(State) / sizeof(int64_t);

// What a request in the batch has written. A row of `state_seats`, int64
// [num_seats, 28].
struct StateSeat {
  int64_t generation;    // 0: nothing
  int64_t length;        // tokens that are in the state which it reads next
  int64_t first_length;  // tokens that are in the first of its last columns
  int64_t num_columns;
  int64_t step;
  int64_t last_token;  // the last one that is in the state which it reads next
  int64_t boundary;    // position of one that vLLM was to copy after the step; 0: none
  // Tokens whose inputs a convolution's buffer has, and the first column that is read.
  int64_t num_buffered;
  int64_t first_read;
  int32_t buffered[kMaxBuffer];
  // Of rings: the first position whose row is known, and behind the last one that was
  // ever written, drafts included, with its step.
  int64_t first_row;
  int64_t end_row;
  int64_t end_step;
};
static_assert(sizeof(StateSeat) == 224, "a StateSeat is a row of state_seats");

// What a block's states were when they were last recorded. A row of `state_records`,
// int64 [num_state_blocks, 4].
struct StateRecord {
  uint64_t hash;       // H of the text in it (audit.h)
  int32_t generation;  // of the request that wrote; 0: not known
  int32_t length;      // tokens of the text
  int32_t step;
  int32_t opaque;      // its text is not known; or kLoadedState
  int32_t last_token;  // of the text; -1: not known, or a place in an image
  int32_t unused;

  NWOR_HOST_DEVICE bool is_known() const {
    return generation != 0 && opaque != kLoadedState;
  }
};
static_assert(sizeof(StateRecord) == 32, "a StateRecord is a row of state_records");

// What is found out about one state of a request in a step. A row of `verdicts`, int64
// [num_seats, num_states, 6].
struct Verdict {
  int64_t kind;  // FindingClass, -1: nothing
  int64_t generation;
  int64_t length;
  int64_t step;
  int64_t boundary = 0;  // of the request's block that ends there; 0: of what it reads
  int64_t position = 0;  // of a ring: whose row is lost
};

// A group's block table, as AuditStep has that of an attention group; an entry is a
// block.
struct StateBlocks {
  const int32_t* blocks;  // nullptr: not known
  int64_t stride;
  int64_t width;
};

// Where the kernels of a step find a group's states: vLLM's own metadata, device
// memory. Batch rows are windows (they keep a state for each token) or not. Of rings
// there are `blocks` alone: the group's block table. A row of `metadata`, int64
// [num_groups, 11].
struct StateMetadata {
  const uint8_t* is_window;      // [num_reqs] bool; nullptr: the first rows are windows
  int64_t num_windows;           // so many, without is_window
  const int32_t* window_blocks;  // [windows, 1 + K], rows may be strided
  int64_t window_stride;
  const int32_t* num_accepted;  // [windows]: n, column n - 1 is read; nullptr: 1
  const int32_t* blocks;        // of the other rows; strided
  int64_t block_stride;
  const uint8_t* has_state;  // of the other rows: bool; nullptr: all have, or seq_lens
  int64_t num_decodes;       // the first of the other rows, which all have
  const int32_t* seq_lens;   // [num_reqs]: a row has one if it is longer than its query
  int64_t only_decodes;      // a CUDA graph of decodes is replayed: no prompts are run
};
constexpr int64_t kMetadataColumns = sizeof(StateMetadata) / sizeof(int64_t);

// The begin of `state_tables`, int64 on the host.
struct StateTables {
  const State* states;
  StateSeat* state_seats;
  uint64_t* wanted;   // [num_seats, num_states]: of the sample that is read next
  uint64_t* columns;  // [num_seats, num_states, num_kept]: of those written last; of a
                      // ring: of the open group's rows, position p at p % ratio
  uint64_t* scratch;  // [num_seats, num_states, num_scratch], by batch row: from before
  int32_t* last_tokens;  // [num_groups, num_blocks]: the last one that a block's
                         // temporal states have, or see above
  int64_t* totals;       // [2]: samples compared; read, but not known
  StateRecord* state_records;
  uint64_t* boundaries;  // [num_state_blocks, max_in_group]: samples of the records
  Verdict* verdicts;     // [num_seats, num_states], by batch row
  int32_t* tickets;      // [num_seats]: teams of a batch row that are done
  int64_t num_states;
  int64_t num_groups;
  int64_t num_recurrent;  // of the groups: the first ones; the others are rings
  int64_t max_columns;    // 1 + K
  int64_t num_kept;       // as many, or the largest ratio
  int64_t conv_window;    // State::window of the convolutions
  int64_t num_scratch;
  int64_t num_state_blocks;
  int64_t max_in_group;     // states of a group
  int64_t boundary_tokens;  // of a block; 0: states are not in the prefix cache
  StateBlocks state_blocks[kMaxStateGroups];

  NWOR_HOST_DEVICE uint64_t* scratch_of(int64_t row, int64_t state) const {
    return scratch + (row * num_states + state) * num_scratch;
  }
  NWOR_HOST_DEVICE uint64_t* columns_of(int64_t seat, int64_t state) const {
    return columns + (seat * num_states + state) * num_kept;
  }
  NWOR_HOST_DEVICE uint64_t& boundary_of(int64_t block, int64_t state) const {
    return boundaries[block * max_in_group + states[state].in_group];
  }
};
constexpr int64_t kStateTablesColumns = sizeof(StateTables) / sizeof(int64_t);

struct StatesArgs : AuditStep, StateTables {
  StateMetadata metadata[kMaxStateGroups];
};

// Before the forward, when metadata is final and vLLM has copied what it copies.
struct AuditStatesReadArgs : StatesArgs {
  static constexpr const char* kOp = "audit_states_read";
};

// After sampling; before audit_resolve.
struct AuditStatesWrittenArgs : StatesArgs {
  static constexpr const char* kOp = "audit_states_written";
  const int32_t* cu_num_logits = nullptr;  // [num_reqs], or nullptr: no drafts
  Acceptance acceptance{};
  // [2, num_seats, num_recurrent, 8 + max_in_group], by batch row, memory that the host
  // reads, or nullptr: of boundaries that the step has left, and of those that requests
  // found where a KV connector was to fill them, a BlockDigest and the samples. A row
  // is of this step if is_known is its number. tokens: the last one of the text.
  int64_t* digests_to = nullptr;
};

}  // namespace nwor
