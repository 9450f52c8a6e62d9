// SPDX-License-Identifier: Apache-2.0
//
// The audit's ops: from tensors to launchers. audit_describe and audit_describe_layers
// write a group's tables, addresses and sizes, into one tensor on the host, which the
// others take: few arguments, in few calls a step. Whoever holds it keeps the tables.
#include "audit.h"
#include "check.h"
#include "dispatch.h"

namespace nwor {
namespace {

using torch::headeronly::ScalarType;

// What `tables` holds; behind it, num_parts AuditBytes.
struct Tables {
  int64_t mark;
  int64_t device_type;
  int64_t device_index;
  AuditGroup group;
  int64_t entry_tokens;
  int64_t window;
  int64_t num_parts;

  AuditBytes& part(int64_t index) {
    return reinterpret_cast<AuditBytes*>(this + 1)[index];
  }
};
constexpr int64_t kMark = 0x6E776F7241756431;
constexpr int64_t kTablesColumns = sizeof(Tables) / sizeof(int64_t);
constexpr int64_t kPartColumns = sizeof(AuditBytes) / sizeof(int64_t);
static_assert(sizeof(Tables) % 8 == 0 && sizeof(AuditBytes) % 8 == 0,
              "they lie in an int64 tensor");

// The rows of an int64 table, one struct each.
template <typename Row>
Row* rows_of(const TensorArgs& tensors, const char* name, const Tensor& tensor) {
  auto* const first = tensors.values<int64_t>(name, tensor, 2);
  tensors.size_is(name, tensor, 1, sizeof(Row) / sizeof(int64_t), "its columns");
  return reinterpret_cast<Row*>(first);
}

// Checks a tensor that the host reads or writes.
TensorArgs on_host(const char* op, const char* name, const Tensor& tensor) {
  const TensorArgs host(op, name, tensor);
  NWOR_CHECK(!host.on_cuda(), op, name, " is on CUDA; must be on cpu");
  return host;
}

Tables& room_in(const char* op, const Tensor& tables) {
  auto* const to = on_host(op, "tables", tables).values<int64_t>("tables", tables);
  const int64_t size = tables.size(0);
  NWOR_CHECK(size >= kTablesColumns && (size - kTablesColumns) % kPartColumns == 0, op,
             "tables has ", size, " entries; must have ", kTablesColumns + 0, ", and ",
             kPartColumns + 0, " for each table of layers");
  return *reinterpret_cast<Tables*>(to);
}

// One call's arguments: those that were described, and those that come with it.
struct Call {
  Tables& tables;
  const AuditGroup& group;
  TensorArgs tensors;
};
Call call_of(const char* op, const Tensor& tables) {
  Tables& found = room_in(op, tables);
  NWOR_CHECK(found.mark == kMark, op, "tables was not written by audit_describe");
  return {found, found.group,
          TensorArgs(op, "records", static_cast<int32_t>(found.device_type),
                     static_cast<int32_t>(found.device_index))};
}

AuditGroup group_of(const TensorArgs& tensors, const Tensor& records,
                    const Tensor& seats, const Tensor& expected, const Tensor& owners,
                    const Tensor& plan, const Tensor& findings, const Tensor& stores,
                    int64_t block_size) {
  auto* const block_ends = tensors.values<int64_t>("expected", expected, 2);
  auto* const of_blocks = tensors.values<int32_t>("owners", owners);
  Finding* rows = rows_of<Finding>(tensors, "findings", findings);
  NWOR_CHECK(findings.size(0) > 1, tensors.op(), "findings has ", findings.size(0),
             " rows; must have room for one behind the header");
  auto* const numbers = tensors.values<int64_t>("stores", stores);
  NWOR_CHECK(block_size > 0 && stores.size(0) >= owners.size(0) &&
                 records.size(0) == stores.size(0) * block_size,
             tensors.op(), "block_size is ", block_size, "; ", stores.size(0),
             " blocks of it must be the ", records.size(0),
             " rows of records, and at least those of owners, ", owners.size(0));
  NWOR_CHECK(expected.size(0) == seats.size(0), tensors.op(), "expected has ",
             expected.size(0), " rows; must have ", seats.size(0), ", as seats");
  return {rows_of<SlotRecord>(tensors, "records", records),
          owners.size(0) * block_size,
          rows_of<Seat>(tensors, "seats", seats),
          seats.size(0),
          block_ends,
          expected.size(1),
          of_blocks,
          block_size,
          rows_of<PlanRow>(tensors, "plan", plan),
          plan.size(0),
          rows + 1,
          findings.size(0) - 1,
          reinterpret_cast<FindingsHeader*>(rows),
          numbers,
          stores.size(0) - owners.size(0)};
}

AuditStep step_of(const Call& call, const Tensor& row_seats,
                  const Tensor& query_start_loc, const Tensor& block_table,
                  int64_t num_reqs, int64_t step) {
  const TensorArgs& tensors = call.tensors;
  const auto* const starts =
      tensors.values<int32_t>("query_start_loc", query_start_loc);
  tensors.array_of("block_table", block_table, ScalarType::Int, 2);
  NWOR_CHECK(num_reqs >= 0 && num_reqs <= row_seats.size(0) &&
                 num_reqs < query_start_loc.size(0) && num_reqs <= block_table.size(0),
             tensors.op(), "num_reqs is ", num_reqs,
             "; row_seats, query_start_loc and block_table have ", row_seats.size(0),
             ", ", query_start_loc.size(0), " and ", block_table.size(0), " rows");
  const AuditBatch batch{tensors.indices("row_seats", row_seats),
                         starts,
                         num_reqs,
                         static_cast<const int32_t*>(block_table.data_ptr()),
                         block_table.stride(0),
                         block_table.size(1),
                         call.tables.entry_tokens};
  return {call.group, batch, call.tables.window, step};
}

AuditBytes bytes_of(const TensorArgs& tensors, const AuditGroup& group,
                    const Tensor& table, const OptionalTensor& runs,
                    const Tensor& contents, int64_t first_column, int64_t table_index) {
  auto* const sums = tensors.values<int32_t>("contents", contents, 2);
  const LayerTable layers = tensors.table(table);
  // On CUDA the rows are where the host cannot read them.
  if (!tensors.on_cuda()) {
    NWOR_CHECK(layers.rows[0].num_slots() == group.num_slots, tensors.op(),
               "table has layers of ", layers.rows[0].num_slots(), " slots; must have ",
               group.num_slots, ", as records");
  }
  const int64_t num_rows = group.num_slots + group.num_stored * group.block_size;
  NWOR_CHECK(contents.size(0) == num_rows && first_column >= 0 &&
                 first_column + layers.num_layers <= contents.size(1),
             tensors.op(), "contents has shape [", contents.size(0), ", ",
             contents.size(1), "]; must have ", num_rows, " rows, and ",
             layers.num_layers, " columns from ", first_column);
  return {layers,           tensors.runs(runs), sums,
          contents.size(1), first_column,       table_index};
}

const int32_t* tokens_of(const TensorArgs& tensors, const Tensor& tokens,
                         int64_t length, int64_t room) {
  const auto* const ids = tensors.values<int32_t>("tokens", tokens);
  NWOR_CHECK(length >= 0 && length <= tokens.size(0) && length <= room, tensors.op(),
             "length is ", length, "; must be at most the ", tokens.size(0),
             " tokens, and the ", room, " that expected has room for");
  return ids;
}

// Numbers of blocks that the host has.
const int32_t* block_ids(const Call& call, const Tensor& blocks) {
  const TensorArgs& tensors = call.tensors;
  const int64_t num_blocks = call.group.num_blocks();
  const TensorArgs host = on_host(tensors.op(), "blocks", blocks);
  const auto* const ids = host.values<int32_t>("blocks", blocks);
  for (int64_t i = 0; i < blocks.size(0); ++i) {
    NWOR_CHECK(ids[i] >= 0 && ids[i] < num_blocks, tensors.op(), "blocks[", i, "] is ",
               ids[i], "; must be between 0 and ", num_blocks - 1);
  }
  return ids;
}

const AuditBytes& layers_of(const Call& call, int64_t index) {
  const AuditBytes& part = call.tables.part(index);
  NWOR_CHECK(part.table.rows != nullptr, call.tensors.op(), "tables lacks its layers ",
             index, "; audit_describe_layers must have written them");
  return part;
}

// Of one row's hit; or with row -1 of all rows, from the cursor on.
void scan(const Call& call, const AuditStep& step, int64_t row, int64_t num_blocks) {
  const int64_t num_parts = call.tables.num_parts;
  for (int64_t i = 0; i < num_parts; ++i) {
    const AuditScanArgs args{step, layers_of(call, i), row, num_blocks,
                             i + 1 == num_parts};
    NWOR_DISPATCH(call.tensors, args, audit_scan);
  }
}

// What was found since the last time, to memory that the host reads.
void publish(const Call& call, const Tensor& findings_to) {
  const AuditGroup& group = call.group;
  const char* const op = call.tensors.op();
  Finding* to = rows_of<Finding>(on_host(op, "findings_to", findings_to), "findings_to",
                                 findings_to);
  NWOR_CHECK(findings_to.size(0) == group.capacity + 1, op, "findings_to has ",
             findings_to.size(0), " rows; must have ", group.capacity + 1,
             ", as findings");
  const AuditPublishArgs args{group, reinterpret_cast<FindingsHeader*>(to), to + 1};
#ifdef NWOR_CUDA
  if (call.tensors.on_cuda()) {
    check_device_sees(op, static_cast<const int64_t*>(findings_to.data_ptr()));
  }
#endif
  NWOR_DISPATCH(call.tensors, args, audit_publish);
}

}  // namespace

void audit_describe(Tensor tables, Tensor records, Tensor seats, Tensor expected,
                    Tensor owners, Tensor plan, Tensor findings, Tensor stores,
                    int64_t block_size, int64_t entry_tokens, int64_t window) {
  const TensorArgs tensors("audit_describe", "records", records);
  Tables& to = room_in(tensors.op(), tables);
  NWOR_CHECK(entry_tokens > 0, tensors.op(), "entry_tokens is ", entry_tokens,
             "; must be at least 1");
  to = {0,
        tensors.device_type(),
        tensors.device_index(),
        group_of(tensors, records, seats, expected, owners, plan, findings, stores,
                 block_size),
        entry_tokens,
        window,
        (tables.size(0) - kTablesColumns) / kPartColumns};
  to.mark = kMark;
}

void audit_describe_layers(Tensor tables, int64_t index, Tensor table,
                           OptionalTensor runs, Tensor contents, int64_t first_column) {
  const Call call = call_of("audit_describe_layers", tables);
  NWOR_CHECK(index >= 0 && index < call.tables.num_parts, call.tensors.op(),
             "index is ", index, "; must be between 0 and ", call.tables.num_parts - 1);
  call.tables.part(index) =
      bytes_of(call.tensors, call.group, table, runs, contents, first_column, index);
}

void audit_seat(Tensor tables, Tensor tokens, int64_t length, int64_t seat,
                int64_t generation, int64_t seed, bool opaque, int64_t loads,
                int64_t hit_length) {
  const Call call = call_of("audit_seat", tables);
  const AuditGroup& group = call.group;
  NWOR_CHECK(seat >= 0 && seat < group.num_seats, call.tensors.op(), "seat is ", seat,
             "; must be between 0 and ", group.num_seats - 1);
  const AuditSeatArgs args{
      group,
      tokens_of(call.tensors, tokens, length, group.max_blocks * group.block_size),
      length,
      seat,
      {0, 0, generation, opaque ? 1 : 0, hit_length, loads, seed, 1}};
  NWOR_DISPATCH(call.tensors, args, audit_seat);
}

void audit_plan(Tensor tables, Tensor row_seats, Tensor query_start_loc,
                Tensor block_table, int64_t num_reqs, Tensor tokens, Tensor positions,
                Tensor slot_mapping, int64_t num_tokens, int64_t step) {
  const Call call = call_of("audit_plan", tables);
  const TensorArgs& tensors = call.tensors;
  const auto* const at = tensors.values<int64_t>("positions", positions);
  int64_t num_slots = 0;
  const int64_t* const slots = tensors.slot_mapping(slot_mapping, &num_slots);
  NWOR_CHECK(num_tokens >= 0 && num_tokens <= positions.size(0) &&
                 num_tokens <= num_slots && num_tokens <= call.group.max_tokens,
             tensors.op(), "num_tokens is ", num_tokens,
             "; positions, slot_mapping and plan have ", positions.size(0), ", ",
             num_slots, " and ", call.group.max_tokens, " rows");
  const AuditPlanArgs args{
      step_of(call, row_seats, query_start_loc, block_table, num_reqs, step),
      tokens_of(tensors, tokens, num_tokens, num_tokens), at, slots, num_tokens};
  NWOR_DISPATCH(tensors, args, audit_plan);
}

void audit_resolve(Tensor tables, Tensor row_seats, Tensor query_start_loc,
                   Tensor block_table, int64_t num_reqs, OptionalTensor cu_num_logits,
                   OptionalTensor sampled_token_ids, int64_t vocab_size,
                   OptionalTensor num_rejected, int64_t num_tokens, int64_t step,
                   bool is_undone, int64_t num_blocks, OptionalTensor findings_to) {
  const Call call = call_of("audit_resolve", tables);
  const TensorArgs& tensors = call.tensors;
  AuditResolveArgs args{
      step_of(call, row_seats, query_start_loc, block_table, num_reqs, step),
      nullptr,
      {},
      is_undone};
  if (cu_num_logits.has_value()) {
    args.cu_num_logits = tensors.values<int32_t>("cu_num_logits", *cu_num_logits);
    args.acceptance = tensors.acceptance(sampled_token_ids, vocab_size, num_rejected);
    NWOR_CHECK(
        cu_num_logits->size(0) >= num_reqs && args.acceptance.num_reqs >= num_reqs,
        tensors.op(), "cu_num_logits has ", cu_num_logits->size(0),
        " entries and the acceptance ", args.acceptance.num_reqs, " rows; must have ",
        num_reqs, ", num_reqs");
  }
  NWOR_CHECK(num_tokens >= 0 && num_tokens <= call.group.max_tokens, tensors.op(),
             "num_tokens is ", num_tokens, "; must be between 0 and ",
             call.group.max_tokens, ", the rows of plan");
  NWOR_DISPATCH(tensors, args, audit_resolve);
  const int64_t num_parts = call.tables.num_parts;
  for (int64_t i = 0; i < num_parts; ++i) {
    const AuditRecordArgs of_part{args, layers_of(call, i), num_tokens, is_undone,
                                  i + 1 == num_parts};
    NWOR_DISPATCH(tensors, of_part, audit_record);
  }
  if (num_blocks > 0) {
    scan(call, args, -1, num_blocks);
  }
  if (findings_to.has_value()) {
    publish(call, *findings_to);
  }
}

void audit_adopt(Tensor tables, Tensor row_seats, Tensor query_start_loc,
                 Tensor block_table, int64_t num_reqs, Tensor tokens, int64_t length,
                 int64_t row, int64_t step, int64_t num_blocks) {
  const Call call = call_of("audit_adopt", tables);
  const AuditGroup& group = call.group;
  NWOR_CHECK(row >= 0 && row < num_reqs, call.tensors.op(), "row is ", row,
             "; must be between 0 and ", num_reqs - 1);
  const AuditAdoptArgs args{
      step_of(call, row_seats, query_start_loc, block_table, num_reqs, step),
      tokens_of(call.tensors, tokens, length, group.max_blocks * group.block_size),
      length, row};
  NWOR_DISPATCH(call.tensors, args, audit_adopt);
  scan(call, args, row, num_blocks);
}

void audit_scan(Tensor tables, Tensor row_seats, Tensor query_start_loc,
                Tensor block_table, int64_t num_reqs, int64_t num_blocks,
                int64_t step) {
  const Call call = call_of("audit_scan", tables);
  scan(call, step_of(call, row_seats, query_start_loc, block_table, num_reqs, step), -1,
       num_blocks);
}

void audit_hand_on(Tensor tables, Tensor blocks, Tensor numbers, int64_t step,
                   bool fills) {
  const Call call = call_of("audit_hand_on", tables);
  const char* const op = call.tensors.op();
  const TensorArgs host = on_host(op, "numbers", numbers);
  const auto* const of_blocks = host.values<int64_t>("numbers", numbers);
  host.size_is("numbers", numbers, 0, blocks.size(0), "as blocks");
  const bool keeps = call.group.num_stored > 0 && call.tables.num_parts > 0;
  for (int64_t i = 0; i < numbers.size(0); ++i) {
    NWOR_CHECK(of_blocks[i] >= 0 && (keeps || of_blocks[i] == 0), op, "numbers[", i,
               "] is ", of_blocks[i], "; must be at least 0",
               keeps ? "" : ", and 0 where stores has no room");
  }
  AuditHandOnArgs args{call.group, block_ids(call, blocks),
                       of_blocks,  blocks.size(0),
                       step,       fills,
                       nullptr,    0};
  if (keeps) {
    args.contents = layers_of(call, 0).contents;
    args.num_columns = layers_of(call, 0).num_columns;
  }
  NWOR_DISPATCH(call.tensors, args, audit_hand_on);
}

void audit_snapshot(Tensor tables, bool again) {
  const Call call = call_of("audit_snapshot", tables);
  for (int64_t i = 0; i < call.tables.num_parts; ++i) {
    const AuditSnapshotArgs args{call.group, layers_of(call, i), again};
    NWOR_DISPATCH(call.tensors, args, audit_snapshot);
  }
}

void audit_hand_out(Tensor tables, Tensor blocks, Tensor generations) {
  const Call call = call_of("audit_hand_out", tables);
  const TensorArgs host(call.tensors.op(), "blocks", blocks);
  const auto* const of_blocks = host.values<int32_t>("generations", generations);
  host.size_is("generations", generations, 0, blocks.size(0), "as blocks");
  const AuditHandOutArgs args{call.group, block_ids(call, blocks), of_blocks,
                              blocks.size(0)};
  NWOR_DISPATCH(call.tensors, args, audit_hand_out);
}

void audit_publish(Tensor tables, Tensor findings_to) {
  publish(call_of("audit_publish", tables), findings_to);
}

}  // namespace nwor
