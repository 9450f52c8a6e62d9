// SPDX-License-Identifier: Apache-2.0
//
// The KV audit: its tables of slots and requests, and the launchers' arguments.
// audit_rules.h has the comparisons, for the CPU and for CUDA. The audit reads caches
// and never writes them.
//
// A slot's identity is H[p] = seed + sum over i <= p of mix64(token_i, i), where p is
// the position that was written there. Equal texts have equal H. It is a sum, so that a
// batch is one parallel scan. It is chained from the request's own value, never from
// the slot before, which may be the corrupt one. Where a text has an image (a Feature),
// a number derived from the image replaces the token.
//
// vllm/v1/nwor/audit/tables.py allocates the tables.
#pragma once

#include <cstdint>

#include "common/saved_windows.h"
#include "common/table.h"
#include "common/window.h"

namespace nwor {

// What a slot holds. Unknown: something that cannot be verified (a connector's load,
// prompt embeddings, the content after a wake-up); it matches any text.
enum SlotState : int32_t {
  kSlotNever,
  kSlotUnknown,
  kSlotPlanned,
  kSlotCommitted,
  kSlotRejected,
  kSlotLoaded,  // a KV connector fills it
  kSlotUndone,  // of a row of a plan: a rejected draft's, which holds what it held
                // before
};

// The state of a slot's checksums. Replaced: the checksums are of what a load should
// have replaced. Claimed: a thread block of scan is
// processing it. Loaded: there are none here, but those of what the load should have
// brought (`stores`).
enum SlotContent : int32_t {
  kContentClaimed = -2,
  kContentReplaced,
  kContentNone,
  kContentKnown,
  kContentLoaded,
};

// A row of `records`, int64 [num_slots, 4]: the last write to a slot.
struct alignas(16) SlotRecord {
  uint64_t hash;
  int32_t token;
  int32_t position;
  int32_t step;
  int32_t generation;  // of the request that wrote; 0: none
  int32_t state;       // SlotState
  int32_t content;     // SlotContent
};
static_assert(sizeof(SlotRecord) == 32, "a SlotRecord is a row of records");

// Where a request's hit may come from, other than the cache. Known: the slots that a
// load fills are kSlotLoaded. Unknown: any slot of a hit may have been filled.
enum Loads : int64_t { kNoLoads, kKnownLoads, kUnknownLoads };

// Flags: what a request has to do with other engines. It gives its keys and values to
// one that decodes, or takes them from one that has computed the prompt.
enum Handover : int64_t { kNoHandover = 0, kGives = 1, kTakes = 2 };

// A row of `seats`, int64 [num_seats, 10]: a request in the batch.
struct Seat {
  uint64_t hash;  // H of its last committed position
  int64_t length;
  int64_t generation;
  int64_t opaque;      // its text is not known: identity is not checked
  int64_t hit_length;  // positions below were written by others, or loaded
  int64_t loads;       // Loads: whether its hit may come from a KV connector
  uint64_t seed;       // H in front of its first position
  int64_t num_features;
  int64_t last_of_hit;  // the token at hit_length - 1; -1: a place in an image
  int64_t handover;     // of Handover
};
static_assert(sizeof(Seat) == 80, "a Seat is a row of seats");

// Positions [begin, end) of a text that hold an image, or another input that is not
// tokens. A row of `features`, int64 [num_seats * kMaxFeatures, 3].
struct Feature {
  int64_t begin;
  int64_t end;
  uint64_t identity;  // of the image
};
constexpr int64_t kMaxFeatures = 64;  // of a request

// A row of `plan`, int64 [max_tokens, 10]: a batch row, and what its slot held.
struct PlanRow {
  int64_t slot;  // -1: none
  uint64_t hash;
  int64_t position;
  int32_t token;
  int32_t state;  // kSlotPlanned, then kSlotCommitted, kSlotRejected or kSlotUndone
  int64_t seat;
  // Of a row that is kept: layers whose checksums did not change when they should have,
  // and the first one's column of `contents`; -1: its bytes are not recorded.
  int32_t num_same;
  int32_t first_same;
  SlotRecord old;
};
static_assert(sizeof(PlanRow) == 80, "a PlanRow is a row of plan");

enum FindingClass : int64_t {
  kForeignWrite,
  kWrongPrefix,
  kChanged,
  kMissingWrite,
  kHandedOn,
  kNeverLoaded,
  // Of recurrent states (states.h).
  kStaleState,
  kForeignState,
  kChangedState,
  kStateNotWritten,
  kNoStateYet,
  kStateLost,
  kStateAhead,
  kRingOverwritten,
  kNumFindingClasses,
};

// A row of `findings`, int64 [1 + capacity, 11]; the first row is a FindingsHeader.
// Finding number n since the last step's end is in row 1 + n; there is no room for more
// than `capacity`. The findings of a step are shown in the order of their columns.
struct Finding {
  int64_t step;
  int64_t kind;
  int64_t owner;  // generation of the request that the slot belongs to
  int64_t position;
  int64_t slot;
  int64_t layer;  // its column of `contents`; -1: no layer in particular
  int64_t num_layers;
  int64_t writer;  // generation of the request that wrote last
  int64_t writer_step;
  int64_t expected;
  int64_t found;
};
static_assert(sizeof(Finding) == 88, "a Finding is a row of findings");

// Running totals.
struct FindingsHeader {
  int64_t num_findings;
  int64_t num_unverified;    // slots taken over from somewhere that is not audited
  int64_t num_identities;    // slots and block ends compared
  int64_t num_contents;      // slots with compared bytes
  int64_t num_returned;      // slots that a load filled with what was stored
  int64_t cursor;            // of the batch's blocks, the next one to compare
  int64_t next_cursor;       // from the end of the step on
  int64_t num_published;     // findings up to the end of the last step
  int64_t num_suspects;      // rows of plan that are suspects
  uint64_t fingerprint;      // the last one of the weights, as AuditGroup::words
  int64_t fingerprint_step;  // 0: none was taken
};
static_assert(sizeof(FindingsHeader) == sizeof(Finding), "it is a row of findings");

// Of a block whose digest is taken. Computed: a request has filled it in this step.
// Loaded: a load has. Of requests with a Handover also: found, in the cache; tail, a
// text's last block, full or not: by slot.
enum DigestKind : int64_t { kComputed, kLoaded, kFound, kTail };

// A row of `digests`, int64 [1 + 2 * max_digests, 8]: a block whose digest goes to the
// host (loads.py). The first max_digests rows are of computed blocks, the others of all
// other kinds. On the host AuditGroup::num_sums checksums follow: one for each column
// of `contents`, a sum over the block's slots; of a tail one for each slot, a sum over
// the columns.
struct BlockDigest {
  uint64_t hash;  // H of its last filled slot; 0: its text is not known
  int64_t block;
  int64_t position;  // of its first slot
  int64_t generation;
  int64_t num_slots;  // that a load has filled; of a tail: that it has
  int64_t kind;       // DigestKind
  uint64_t tokens;    // a sum over the block's own tokens, wherever it lies in a text
  int64_t is_known;   // each of its slots has checksums
};
static_assert(sizeof(BlockDigest) == 64, "a BlockDigest is a row of digests");

// How many there are; the row in front of the others. step: set on the host only.
struct DigestsHeader {
  int64_t num_computed;
  int64_t num_others;
  int64_t step;
  int64_t unused[5];
};
static_assert(sizeof(DigestsHeader) == sizeof(BlockDigest), "it is a row of digests");

// One group's state: the begin of `tables`, int64 on the host. Behind it lie num_parts
// AuditParts.
//
// Behind the cache's slots, `records` and `contents` have those of num_stored blocks
// more, the kept ones: what was known of the blocks that a KV connector stored last.
// Stores have numbers, from 1; number n is kept in block num_blocks + n % num_stored.
struct AuditGroup {
  int64_t device;  // CUDA's number; -1: the CPU
  SlotRecord* records;
  Seat* seats;
  Feature* features;   // [num_seats, kMaxFeatures]
  uint64_t* expected;  // [num_seats, max_blocks]: H at block ends; 0: not known
  int32_t* owners;     // [num_blocks]: generation; 0: nobody's; below: it holds
                       // recurrent states of that one
  PlanRow* plan;
  FindingsHeader* header;
  // [num_blocks + num_stored]: which store a load brought to the block; of a kept
  // block, which it is. 0: none.
  int64_t* stores;
  DigestsHeader* digests;
  int32_t* contents;  // [rows of records, num_columns]: checksums
  int64_t num_columns;
  int64_t num_seats;
  int64_t max_blocks;
  int64_t max_tokens;
  int64_t capacity;
  int64_t num_blocks;
  int64_t num_stored;
  int64_t max_digests;   // 0: no digests are taken
  int64_t block_size;    // tokens a block, as the scheduler counts
  int64_t entry_tokens;  // positions that an entry of the block table stands for
  int64_t window;  // positions below it from a request's end may be gone; 0: none are
  int64_t num_parts;
  // [num_words], device: where words of 8 bytes of the model's parameters are. The host
  // sets both for the steps that take a fingerprint of them; num_words is 0 in others.
  const uint64_t* const* words;
  int64_t num_words;
  // A cudaStream_t, and a cudaEvent_t to start it with: what only the audit waits for
  // runs there, beside the drafter's model. nullptr: in the stream of the step.
  void* beside;
  void* forked;
  int64_t is_all_beside;  // all that follows sampling; 0: only what reads caches

  NWOR_HOST_DEVICE int64_t num_slots() const { return num_blocks * block_size; }
  NWOR_HOST_DEVICE BlockDigest* digest_at(int64_t row) const {
    return reinterpret_cast<BlockDigest*>(digests + 1) + row;
  }
  // Of a row of digests on the host.
  NWOR_HOST_DEVICE int64_t num_sums() const {
    return num_columns > block_size ? num_columns : block_size;
  }
  NWOR_HOST_DEVICE int64_t kept_block(int64_t number) const {
    return num_blocks + number % num_stored;
  }
  NWOR_HOST_DEVICE bool is_block_end(int64_t position) const {
    return (position + 1) % block_size == 0;
  }
  // Block 0 is the scheduler's null block.
  NWOR_HOST_DEVICE bool is_in_cache(int64_t slot) const {
    return slot >= block_size && slot < num_slots();
  }
  // The first block of a request of `length` tokens that is still its own, and the one
  // behind its last.
  NWOR_HOST_DEVICE int64_t first_block(int64_t length) const {
    return window > 0 && length >= window ? (length - window + 1) / block_size : 0;
  }
  NWOR_HOST_DEVICE int64_t last_block(int64_t length) const {
    const int64_t end = (length + block_size - 1) / block_size;
    return end < max_blocks ? end : max_blocks;
  }
  NWOR_HOST_DEVICE uint64_t& expected_at(int64_t seat, int64_t block) const {
    return expected[seat * max_blocks + block];
  }
};
constexpr int64_t kGroupColumns = sizeof(AuditGroup) / sizeof(int64_t);

// Layers of one table. Their checksums are columns of `contents`, table after table. On
// CUDA there is one table, of rows.
struct AuditPart {
  LayerTable table;
  RunList runs;
};
constexpr int64_t kPartColumns = sizeof(AuditPart) / sizeof(int64_t);

// Requests in a batch, at most, on CUDA.
constexpr int64_t kMaxReqs = 4096;

// The arguments that all calls of a step share.
struct AuditStep : AuditGroup {
  IndexArray row_seats;            // [num_reqs]
  const int32_t* query_start_loc;  // [num_reqs + 1]
  int64_t num_reqs;
  const int32_t* block_table;  // [num_reqs, width], rows may be strided
  int64_t table_stride;
  int64_t width;
  int64_t num_tokens;
  int64_t step;

  // The slot of `position` by the block table; -1: the table does not go so far.
  // With entries of 16 positions, position 35 is offset 3 of the third entry.
  NWOR_HOST_DEVICE int64_t slot(int64_t r, int64_t position) const {
    const int64_t entry = position / entry_tokens;
    if (position < 0 || entry >= width) {
      return -1;
    }
    return block_table[r * table_stride + entry] * entry_tokens +
           position % entry_tokens;
  }
};

struct AuditPlanArgs : AuditStep {
  static constexpr const char* kOp = "audit_plan";
  const int32_t* tokens;
  const int64_t* positions;
  const int64_t* slot_mapping;
};

// What a request that is new in the batch found in the cache: its text.
struct AuditHit {
  int64_t row;
  const int32_t* tokens;  // [length]
  int64_t length;
};

struct AuditResolveArgs : AuditStep {
  static constexpr const char* kOp = "audit_resolve";
  // Rejected slots hold what they held before the step: those of all windows or, where
  // `staged` has data, of the windows that are staged there.
  bool is_undone;
  SavedWindows staged;
  const AuditPart* parts;  // on the host
  // Blocks to compare byte by byte, of the batch and of each hit.
  int64_t num_scanned;
  int64_t num_hit_blocks;
  FindingsHeader* findings_to;  // as AuditGroup::header, memory that the host reads
  int64_t* digests_to;          // as AuditGroup::digests, with num_sums more; the same
  const int32_t* cu_num_logits = nullptr;  // [num_reqs], or nullptr: no drafts
  Acceptance acceptance{};
  const AuditHit* hits = nullptr;  // on the host
  int64_t num_hits = 0;

  NWOR_HOST_DEVICE bool is_window_undone(int64_t r) const {
    return is_undone && (staged.data == nullptr || is_staged(staged, r));
  }
};

struct AuditSeatArgs : AuditGroup {
  static constexpr const char* kOp = "audit_seat";
  const int32_t* tokens;  // [fresh.hit_length], what is in the cache already
  int64_t seat;
  Seat fresh;  // all but hash and length
  // The first fresh.num_features, which travel with the call.
  Feature fresh_features[kMaxFeatures];
};

// Moves a seat to another H in front of its first position, after the step's plan.
struct AuditReseedArgs : AuditGroup {
  static constexpr const char* kOp = "audit_reseed";
  int64_t seat;
  uint64_t delta;      // what is added to each H of its text
  int64_t num_tokens;  // rows of the plan
};

// What happens to a block, and the value that comes with it.
enum BlockEvent : int64_t {
  kGiven,   // to a request: its generation; 0: to another group, so that its slots hold
            // nothing of this one; below: to one of recurrent states, of that request
  kFilled,  // by a KV connector: the number of the store that it brings; 0: not known
  kStored,  // by a KV connector: the number of the store; 0: it is not kept
};
// Of some blocks. The host has their numbers, which travel with the call.
struct AuditBlocksArgs : AuditGroup {
  static constexpr const char* kOp = "audit_blocks";
  static constexpr int64_t kMaxCount = 256;
  BlockEvent event;
  int64_t step;
  int64_t num_events;
  int64_t values[kMaxCount];
  int32_t blocks[kMaxCount];
};

// Takes the checksums of all slots that no step has written; again: of those that have
// some already.
struct AuditSnapshotArgs : AuditGroup {
  static constexpr const char* kOp = "audit_snapshot";
  const AuditPart* parts;  // on the host
  bool again;
};

// The launchers, and the names of their arguments.
#define NWOR_AUDIT_CALLS(of)                                                      \
  of(Seat) of(Plan) of(Reseed) of(Resolve) of(Blocks) of(Snapshot) of(StatesRead) \
      of(StatesWritten)
template <typename Args>
void audit_cpu(const Args& args);
#ifdef NWOR_CUDA
// `stream` is a cudaStream_t of the current device. None waits for it.
template <typename Args>
void audit_cuda(const Args& args, int device, void* stream);
#endif

}  // namespace nwor
