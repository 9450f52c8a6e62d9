// SPDX-License-Identifier: Apache-2.0
//
// The KV audit: what it keeps of slots and requests, and the launchers' arguments;
// audit_rules.h has what CPU and CUDA do with a row. It reads caches and never writes
// them.
//
// A slot's identity is H[p] = seed + sum over i <= p of mix64(token_i, i), p being
// the position of what was written there: equal for equal texts, and a sum, so that
// a batch is one parallel scan. It is chained from the request's own value, never
// from the slot before, which may be the bad one.
//
// Mirrored by vllm/v1/nwor/audit/tables.py; a test compares the two.
#pragma once

#include <cstdint>

#include "table.h"
#include "window.h"

namespace nwor {

// What a slot holds. Unknown: something that cannot be verified (a connector's load,
// prompt embeddings, what a wake-up left); it matches any text.
enum SlotState : int32_t {
  kSlotNever,
  kSlotUnknown,
  kSlotPlanned,
  kSlotCommitted,
  kSlotRejected,
  kSlotLoaded,  // a KV connector was told to fill it
};

// What is known of a slot's bytes. Replaced: the checksums are of what a load should
// have replaced. Claimed: a thread block of scan has it in its hands. Loaded: there are
// none here, but those of what the load should have brought (`stores`).
enum SlotContent : int32_t {
  kContentClaimed = -2,
  kContentReplaced,
  kContentNone,
  kContentKnown,
  kContentLoaded,
};

// A row of `records`, int64 [num_slots, 4]: the last write to a slot.
struct alignas(16) SlotRecord {
  int64_t hash;
  int32_t token;
  int32_t position;
  int32_t step;
  int32_t generation;  // of the request that wrote; 0: none
  int32_t state;       // SlotState
  int32_t content;     // SlotContent
};
static_assert(sizeof(SlotRecord) == 32, "a SlotRecord is a row of records");

// Where a request's hit may come from besides the cache. Told: the slots that a load
// fills are kSlotLoaded. Untold: any slot of a hit may have been filled.
enum Loads : int64_t { kNoLoads, kToldLoads, kUntoldLoads };

// A row of `seats`, int64 [num_seats, 8]: a request in the batch.
struct Seat {
  int64_t hash;  // H of its last committed position
  int64_t length;
  int64_t generation;
  int64_t opaque;      // its text is not known: identity is not checked
  int64_t hit_length;  // positions below were written by others, or loaded
  int64_t loads;       // Loads: whether its hit may come from a KV connector
  int64_t seed;        // H in front of its first position
  int64_t is_new;      // its hit was not looked at yet
};
static_assert(sizeof(Seat) == 64, "a Seat is a row of seats");

// A row of `plan`, int64 [max_tokens, 10]: a batch row, and what its slot held.
struct PlanRow {
  int64_t slot;  // -1: none
  int64_t hash;
  int64_t position;
  int32_t token;
  int32_t state;  // kSlotPlanned, then kSlotCommitted or kSlotRejected
  int64_t seat;
  // 1 + layer: that layer's checksum alone did not change when it should have (layer:
  // in the table that is being recorded); -1: its bytes are not recorded.
  int64_t suspect;
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
};

// A row of `findings`, int64 [1 + capacity, 12]; the first row is a FindingsHeader.
// Finding number n since the last audit_publish is in row 1 + n; there is no room for
// more than `capacity`.
struct Finding {
  int64_t kind;
  int64_t layer;  // index in its table's list; -1: no layer in particular
  int64_t num_layers;
  int64_t slot;
  int64_t position;
  int64_t owner;   // generation of the request that the slot belongs to
  int64_t writer;  // and of the one that wrote last
  int64_t writer_step;
  int64_t step;
  int64_t expected;
  int64_t found;
  int64_t table;
};
static_assert(sizeof(Finding) == 96, "a Finding is a row of findings");

// Running totals.
struct FindingsHeader {
  int64_t num_findings;
  int64_t num_unverified;   // slots taken over from somewhere that is not audited
  int64_t num_identities;   // slots and block ends compared
  int64_t num_contents;     // slots whose bytes were compared
  int64_t cursor;           // of the batch's blocks, the next one to compare
  int64_t next_cursor;      // from the next audit_publish on
  int64_t num_published;    // findings up to the last audit_publish
  int64_t num_suspects;     // rows of plan that are suspects
  int64_t num_blocks_done;  // thread blocks of a launch that are through
  int64_t num_returned;     // slots compared with what was stored when a load came
  int64_t unused[2];
};
static_assert(sizeof(FindingsHeader) == 96, "the header is a row of findings");

// One group's state, and this step's batch. Positions below `window` from a
// request's end may be gone (0: none are); block 0 is the scheduler's null block.
//
// Behind the cache's slots, `records` and `contents` have those of num_stored blocks
// more, the kept ones: what was known of the blocks that a KV connector stored last.
// Stores have numbers, from 1; number n is kept in block num_blocks() + n % num_stored.
struct AuditGroup {
  SlotRecord* records;
  int64_t num_slots;
  Seat* seats;
  int64_t num_seats;
  int64_t* expected;  // [num_seats, max_blocks]: H at block ends; 0: not known
  int64_t max_blocks;
  int32_t* owners;     // [num_blocks]: generation; 0: nobody's
  int64_t block_size;  // tokens a block, as the scheduler counts
  PlanRow* plan;
  int64_t max_tokens;
  Finding* findings;  // behind the header
  int64_t capacity;
  FindingsHeader* header;
  // [num_blocks + num_stored]: which store a load brought to the block; of a kept
  // block, which it is. 0: none.
  int64_t* stores;
  int64_t num_stored;

  NWOR_HOST_DEVICE int64_t num_blocks() const { return num_slots / block_size; }
  NWOR_HOST_DEVICE int64_t kept_block(int64_t number) const {
    return num_blocks() + number % num_stored;
  }
  NWOR_HOST_DEVICE bool is_block_end(int64_t position) const {
    return (position + 1) % block_size == 0;
  }
};

struct AuditBatch {
  IndexArray row_seats;            // [num_reqs]
  const int32_t* query_start_loc;  // [num_reqs + 1]
  int64_t num_reqs;
  const int32_t* block_table;  // [num_reqs, width], rows may be strided
  int64_t table_stride;
  int64_t width;
  int64_t entry_tokens;  // positions that an entry of the block table stands for

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

// What all calls of a step get.
struct AuditStep {
  AuditGroup group;
  AuditBatch batch;
  int64_t window;
  int64_t step;
};

struct AuditPlanArgs : AuditStep {
  const int32_t* tokens;
  const int64_t* positions;
  const int64_t* slot_mapping;
  int64_t num_tokens;
};

struct AuditResolveArgs : AuditStep {
  const int32_t* cu_num_logits;  // [num_reqs], or nullptr: no drafts
  Acceptance acceptance;
  bool is_undone;  // rejected slots hold what they held before the step
};

// Bytes: one table of layers, whose checksums are columns of `contents` from
// first_column on.
struct AuditBytes {
  LayerTable table;
  RunList runs;
  int32_t* contents;  // [rows of records, num_columns]
  int64_t num_columns;
  int64_t first_column;
  int64_t table_index;

  // [num_layers]: what is known of a slot.
  NWOR_HOST_DEVICE int32_t* known(int64_t slot) const {
    return contents + slot * num_columns + first_column;
  }
};

struct AuditRecordArgs : AuditStep {
  AuditBytes bytes;
  int64_t num_tokens;
  bool is_undone;  // as in AuditResolveArgs
  bool is_last;    // table of the group
};

struct AuditScanArgs : AuditStep {
  AuditBytes bytes;
  int64_t row;  // its hit; or -1: of all rows, from the cursor on
  int64_t num_blocks;
  bool is_last;  // table of the group
};

struct AuditSeatArgs {
  AuditGroup group;
  const int32_t* tokens;  // [length], what is in the cache already
  int64_t length;
  int64_t seat;
  Seat fresh;  // what is known of it but hash and length
};

struct AuditAdoptArgs : AuditStep {
  const int32_t* tokens;  // [length]
  int64_t length;
  int64_t row;
};

// Blocks of the group that a KV connector is about to read, or to fill.
struct AuditHandOnArgs {
  AuditGroup group;
  const int32_t* blocks;   // [count], on the host
  const int64_t* numbers;  // the same: of the stores that they are, or come from
  int64_t count;
  int64_t step;
  bool fills;
  int32_t* contents;  // as in AuditBytes; nullptr: bytes are not compared
  int64_t num_columns;
};

struct AuditSnapshotArgs {
  AuditGroup group;
  AuditBytes bytes;
  bool again;
};

// Blocks go to requests. A generation of 0: the block goes to another group, and its
// slots hold nothing of this one.
struct AuditHandOutArgs {
  AuditGroup group;
  const int32_t* blocks;       // [count], on the host
  const int32_t* generations;  // the same
  int64_t count;
};

// The end of a step: the header and what was found since the last one go to the host.
struct AuditPublishArgs {
  AuditGroup group;
  FindingsHeader* header_to;
  Finding* findings_to;
};

void audit_seat_cpu(const AuditSeatArgs& args);
void audit_plan_cpu(const AuditPlanArgs& args);
void audit_resolve_cpu(const AuditResolveArgs& args);
void audit_adopt_cpu(const AuditAdoptArgs& args);
void audit_record_cpu(const AuditRecordArgs& args);
void audit_scan_cpu(const AuditScanArgs& args);
void audit_hand_on_cpu(const AuditHandOnArgs& args);
void audit_snapshot_cpu(const AuditSnapshotArgs& args);
void audit_hand_out_cpu(const AuditHandOutArgs& args);
void audit_publish_cpu(const AuditPublishArgs& args);

#ifdef NWOR_CUDA
// `stream` is a cudaStream_t of the current device. None waits for it.
void audit_seat_cuda(const AuditSeatArgs& args, int device, void* stream);
void audit_plan_cuda(const AuditPlanArgs& args, int device, void* stream);
void audit_resolve_cuda(const AuditResolveArgs& args, int device, void* stream);
void audit_adopt_cuda(const AuditAdoptArgs& args, int device, void* stream);
void audit_record_cuda(const AuditRecordArgs& args, int device, void* stream);
void audit_scan_cuda(const AuditScanArgs& args, int device, void* stream);
void audit_hand_on_cuda(const AuditHandOnArgs& args, int device, void* stream);
void audit_snapshot_cuda(const AuditSnapshotArgs& args, int device, void* stream);
void audit_hand_out_cuda(const AuditHandOutArgs& args, int device, void* stream);
void audit_publish_cuda(const AuditPublishArgs& args, int device, void* stream);
#endif

}  // namespace nwor
