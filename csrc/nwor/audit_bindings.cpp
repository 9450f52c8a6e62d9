// SPDX-License-Identifier: Apache-2.0
//
// The audit's ops: from tensors to launchers. All but the last two take a
// group as (records, seats, expected, owners, plan, findings, block_size); those that
// look at a batch take it as (row_seats, query_start_loc, block_table, num_reqs,
// entry_tokens), and those that read caches a table of layers as (table, runs,
// contents, first_column, table_index).
#include "audit.h"
#include "bindings.h"
#include "check.h"
#include "dispatch.h"

namespace nwor {
namespace {

using torch::headeronly::ScalarType;

constexpr int64_t kRecordColumns = 4;
constexpr int64_t kSeatColumns = 8;
constexpr int64_t kPlanColumns = 10;
constexpr int64_t kFindingColumns = 12;

template <typename Row>
Row* rows_of(const TensorArgs& tensors, const char* name, const Tensor& tensor,
             int64_t columns) {
  tensors.array(name, tensor, ScalarType::Long, 2);
  tensors.size_is(name, tensor, 1, columns, "its columns");
  return static_cast<Row*>(tensor.data_ptr());
}

AuditGroup group_of(const TensorArgs& tensors, const Tensor& records,
                    const Tensor& seats, const Tensor& expected, const Tensor& owners,
                    const Tensor& plan, const Tensor& findings, int64_t block_size) {
  tensors.array("expected", expected, ScalarType::Long, 2);
  tensors.array("owners", owners, ScalarType::Int, 1);
  Finding* rows = rows_of<Finding>(tensors, "findings", findings, kFindingColumns);
  NWOR_CHECK(findings.size(0) > 1, tensors.op(), "findings has ", findings.size(0),
             " rows; must have room for one behind the header");
  NWOR_CHECK(block_size > 0 && records.size(0) == owners.size(0) * block_size,
             tensors.op(), "block_size is ", block_size, "; ", owners.size(0),
             " blocks of it must be the ", records.size(0), " rows of records");
  NWOR_CHECK(expected.size(0) == seats.size(0), tensors.op(), "expected has ",
             expected.size(0), " rows; must have ", seats.size(0), ", as seats");
  return {rows_of<SlotRecord>(tensors, "records", records, kRecordColumns),
          records.size(0),
          rows_of<Seat>(tensors, "seats", seats, kSeatColumns),
          seats.size(0),
          static_cast<int64_t*>(expected.data_ptr()),
          expected.size(1),
          static_cast<const int32_t*>(owners.data_ptr()),
          block_size,
          rows_of<PlanRow>(tensors, "plan", plan, kPlanColumns),
          plan.size(0),
          rows + 1,
          findings.size(0) - 1,
          reinterpret_cast<FindingsHeader*>(rows)};
}

AuditBatch batch_of(const TensorArgs& tensors, const Tensor& row_seats,
                    const Tensor& query_start_loc, const Tensor& block_table,
                    int64_t num_reqs, int64_t entry_tokens) {
  tensors.array("query_start_loc", query_start_loc, ScalarType::Int, 1);
  tensors.array_of("block_table", block_table, ScalarType::Int, 2);
  NWOR_CHECK(num_reqs >= 0 && num_reqs <= row_seats.size(0) &&
                 num_reqs < query_start_loc.size(0) && num_reqs <= block_table.size(0),
             tensors.op(), "num_reqs is ", num_reqs,
             "; row_seats, query_start_loc and block_table have ", row_seats.size(0),
             ", ", query_start_loc.size(0), " and ", block_table.size(0), " rows");
  NWOR_CHECK(entry_tokens > 0, tensors.op(), "entry_tokens is ", entry_tokens,
             "; must be at least 1");
  return {tensors.indices("row_seats", row_seats),
          static_cast<const int32_t*>(query_start_loc.data_ptr()),
          num_reqs,
          static_cast<const int32_t*>(block_table.data_ptr()),
          block_table.stride(0),
          block_table.size(1),
          entry_tokens};
}

AuditBytes bytes_of(const TensorArgs& tensors, const AuditGroup& group,
                    const Tensor& table, const OptionalTensor& runs,
                    const Tensor& contents, int64_t first_column, int64_t table_index) {
  tensors.array("contents", contents, ScalarType::Int, 2);
  const LayerTable layers = tensors.table(table);
  // On CUDA the rows are where the host cannot read them.
  if (!tensors.on_cuda()) {
    NWOR_CHECK(layers.rows[0].num_slots() == group.num_slots, tensors.op(),
               "table has layers of ", layers.rows[0].num_slots(), " slots; must have ",
               group.num_slots, ", as records");
  }
  NWOR_CHECK(contents.size(0) == group.num_slots && first_column >= 0 &&
                 first_column + layers.num_layers <= contents.size(1),
             tensors.op(), "contents has shape [", contents.size(0), ", ",
             contents.size(1), "]; must have ", group.num_slots, " rows, and ",
             layers.num_layers, " columns from ", first_column);
  return {
      layers,           tensors.runs(runs), static_cast<int32_t*>(contents.data_ptr()),
      contents.size(1), first_column,       table_index};
}

const int32_t* tokens_of(const TensorArgs& tensors, const Tensor& tokens,
                         int64_t length, int64_t room) {
  tensors.array("tokens", tokens, ScalarType::Int, 1);
  NWOR_CHECK(length >= 0 && length <= tokens.size(0) && length <= room, tensors.op(),
             "length is ", length, "; must be at most the ", tokens.size(0),
             " tokens, and the ", room, " that expected has room for");
  return static_cast<const int32_t*>(tokens.data_ptr());
}

// Numbers of blocks that the host has.
const int32_t* block_ids(const TensorArgs& tensors, const Tensor& blocks,
                         int64_t num_blocks) {
  const TensorArgs host(tensors.op(), "blocks", blocks);
  NWOR_CHECK(!host.on_cuda(), tensors.op(), "blocks is on CUDA; must be on cpu");
  host.array("blocks", blocks, ScalarType::Int, 1);
  const auto* ids = static_cast<const int32_t*>(blocks.data_ptr());
  for (int64_t i = 0; i < blocks.size(0); ++i) {
    NWOR_CHECK(ids[i] >= 0 && ids[i] < num_blocks, tensors.op(), "blocks[", i, "] is ",
               ids[i], "; must be between 0 and ", num_blocks - 1);
  }
  return ids;
}

}  // namespace

void audit_seat(Tensor records, Tensor seats, Tensor expected, Tensor owners,
                Tensor plan, Tensor findings, int64_t block_size, Tensor tokens,
                int64_t length, int64_t seat, int64_t generation, int64_t seed,
                bool opaque, int64_t loads, int64_t hit_length) {
  const TensorArgs tensors("audit_seat", "records", records);
  const AuditGroup group =
      group_of(tensors, records, seats, expected, owners, plan, findings, block_size);
  NWOR_CHECK(seat >= 0 && seat < group.num_seats, tensors.op(), "seat is ", seat,
             "; must be between 0 and ", group.num_seats - 1);
  const AuditSeatArgs args{
      group,
      tokens_of(tensors, tokens, length, group.max_blocks * block_size),
      length,
      seat,
      {0, 0, generation, opaque ? 1 : 0, hit_length, loads, seed, 1}};
  NWOR_DISPATCH(tensors, args, audit_seat);
}

void audit_plan(Tensor records, Tensor seats, Tensor expected, Tensor owners,
                Tensor plan, Tensor findings, int64_t block_size, Tensor row_seats,
                Tensor query_start_loc, Tensor block_table, int64_t num_reqs,
                int64_t entry_tokens, Tensor tokens, Tensor positions,
                Tensor slot_mapping, int64_t num_tokens, int64_t step) {
  const TensorArgs tensors("audit_plan", "records", records);
  const AuditGroup group =
      group_of(tensors, records, seats, expected, owners, plan, findings, block_size);
  tensors.array("positions", positions, ScalarType::Long, 1);
  tensors.array("slot_mapping", slot_mapping, ScalarType::Long, 1);
  NWOR_CHECK(num_tokens >= 0 && num_tokens <= positions.size(0) &&
                 num_tokens <= slot_mapping.size(0) && num_tokens <= group.max_tokens,
             tensors.op(), "num_tokens is ", num_tokens,
             "; positions, slot_mapping and plan have ", positions.size(0), ", ",
             slot_mapping.size(0), " and ", group.max_tokens, " rows");
  const AuditPlanArgs args{group,
                           batch_of(tensors, row_seats, query_start_loc, block_table,
                                    num_reqs, entry_tokens),
                           tokens_of(tensors, tokens, num_tokens, num_tokens),
                           static_cast<const int64_t*>(positions.data_ptr()),
                           static_cast<const int64_t*>(slot_mapping.data_ptr()),
                           num_tokens,
                           step};
  NWOR_DISPATCH(tensors, args, audit_plan);
}

void audit_resolve(Tensor records, Tensor seats, Tensor expected, Tensor owners,
                   Tensor plan, Tensor findings, int64_t block_size, Tensor row_seats,
                   Tensor query_start_loc, Tensor block_table, int64_t num_reqs,
                   int64_t entry_tokens, OptionalTensor cu_num_logits,
                   OptionalTensor sampled_token_ids, int64_t vocab_size,
                   OptionalTensor num_rejected, int64_t window, int64_t step,
                   bool is_undone) {
  const TensorArgs tensors("audit_resolve", "records", records);
  AuditResolveArgs args{
      group_of(tensors, records, seats, expected, owners, plan, findings, block_size),
      batch_of(tensors, row_seats, query_start_loc, block_table, num_reqs,
               entry_tokens),
      nullptr,
      {},
      window,
      step,
      is_undone};
  if (cu_num_logits.has_value()) {
    tensors.array("cu_num_logits", *cu_num_logits, ScalarType::Int, 1);
    args.cu_num_logits = static_cast<const int32_t*>(cu_num_logits->data_ptr());
    args.acceptance = tensors.acceptance(sampled_token_ids, vocab_size, num_rejected);
    NWOR_CHECK(
        cu_num_logits->size(0) >= num_reqs && args.acceptance.num_reqs >= num_reqs,
        tensors.op(), "cu_num_logits has ", cu_num_logits->size(0),
        " entries and the acceptance ", args.acceptance.num_reqs, " rows; must have ",
        num_reqs, ", num_reqs");
  }
  NWOR_DISPATCH(tensors, args, audit_resolve);
}

void audit_adopt(Tensor records, Tensor seats, Tensor expected, Tensor owners,
                 Tensor plan, Tensor findings, int64_t block_size, Tensor row_seats,
                 Tensor query_start_loc, Tensor block_table, int64_t num_reqs,
                 int64_t entry_tokens, Tensor tokens, int64_t length, int64_t row,
                 int64_t window, int64_t step) {
  const TensorArgs tensors("audit_adopt", "records", records);
  const AuditGroup group =
      group_of(tensors, records, seats, expected, owners, plan, findings, block_size);
  NWOR_CHECK(row >= 0 && row < num_reqs, tensors.op(), "row is ", row,
             "; must be between 0 and ", num_reqs - 1);
  const AuditAdoptArgs args{
      group,
      batch_of(tensors, row_seats, query_start_loc, block_table, num_reqs,
               entry_tokens),
      tokens_of(tensors, tokens, length, group.max_blocks * block_size),
      length,
      row,
      window,
      step};
  NWOR_DISPATCH(tensors, args, audit_adopt);
}

void audit_record(Tensor records, Tensor seats, Tensor expected, Tensor owners,
                  Tensor plan, Tensor findings, int64_t block_size, Tensor table,
                  OptionalTensor runs, Tensor contents, int64_t first_column,
                  int64_t table_index, int64_t num_tokens, int64_t step, bool is_undone,
                  bool is_last) {
  const TensorArgs tensors("audit_record", "records", records);
  const AuditGroup group =
      group_of(tensors, records, seats, expected, owners, plan, findings, block_size);
  NWOR_CHECK(num_tokens >= 0 && num_tokens <= group.max_tokens, tensors.op(),
             "num_tokens is ", num_tokens, "; must be between 0 and ", group.max_tokens,
             ", the rows of plan");
  const AuditRecordArgs args{
      group,
      bytes_of(tensors, group, table, runs, contents, first_column, table_index),
      num_tokens,
      step,
      is_undone,
      is_last};
  NWOR_DISPATCH(tensors, args, audit_record);
}

void audit_scan(Tensor records, Tensor seats, Tensor expected, Tensor owners,
                Tensor plan, Tensor findings, int64_t block_size, Tensor row_seats,
                Tensor query_start_loc, Tensor block_table, int64_t num_reqs,
                int64_t entry_tokens, Tensor table, OptionalTensor runs,
                Tensor contents, int64_t first_column, int64_t table_index, int64_t row,
                int64_t num_blocks, int64_t window, int64_t step, bool is_last) {
  const TensorArgs tensors("audit_scan", "records", records);
  const AuditGroup group =
      group_of(tensors, records, seats, expected, owners, plan, findings, block_size);
  NWOR_CHECK(row >= -1 && row < num_reqs, tensors.op(), "row is ", row,
             "; must be -1 (all) or between 0 and ", num_reqs - 1);
  const AuditScanArgs args{
      group,
      batch_of(tensors, row_seats, query_start_loc, block_table, num_reqs,
               entry_tokens),
      bytes_of(tensors, group, table, runs, contents, first_column, table_index),
      row,
      num_blocks,
      window,
      step,
      is_last};
  NWOR_DISPATCH(tensors, args, audit_scan);
}

void audit_hand_on(Tensor records, Tensor seats, Tensor expected, Tensor owners,
                   Tensor plan, Tensor findings, int64_t block_size, Tensor blocks,
                   int64_t step, bool fills) {
  const TensorArgs tensors("audit_hand_on", "records", records);
  const AuditGroup group =
      group_of(tensors, records, seats, expected, owners, plan, findings, block_size);
  const AuditHandOnArgs args{group, block_ids(tensors, blocks, owners.size(0)),
                             blocks.size(0), step, fills};
  NWOR_DISPATCH(tensors, args, audit_hand_on);
}

void audit_snapshot(Tensor records, Tensor seats, Tensor expected, Tensor owners,
                    Tensor plan, Tensor findings, int64_t block_size, Tensor table,
                    OptionalTensor runs, Tensor contents, int64_t first_column,
                    int64_t table_index) {
  const TensorArgs tensors("audit_snapshot", "records", records);
  const AuditGroup group =
      group_of(tensors, records, seats, expected, owners, plan, findings, block_size);
  const AuditSnapshotArgs args{group, bytes_of(tensors, group, table, runs, contents,
                                               first_column, table_index)};
  NWOR_DISPATCH(tensors, args, audit_snapshot);
}

void audit_hand_out(Tensor records, Tensor owners, Tensor blocks, Tensor generations,
                    int64_t block_size) {
  const TensorArgs tensors("audit_hand_out", "records", records);
  tensors.array("owners", owners, ScalarType::Int, 1);
  const TensorArgs host(tensors.op(), "blocks", blocks);
  host.array("generations", generations, ScalarType::Int, 1);
  host.size_is("generations", generations, 0, blocks.size(0), "as blocks");
  NWOR_CHECK(block_size > 0 && records.size(0) == owners.size(0) * block_size,
             tensors.op(), "block_size is ", block_size, "; ", owners.size(0),
             " blocks of it must be the ", records.size(0), " rows of records");
  const AuditHandOutArgs args{
      rows_of<SlotRecord>(tensors, "records", records, kRecordColumns),
      static_cast<int32_t*>(owners.data_ptr()),
      owners.size(0),
      block_size,
      block_ids(tensors, blocks, owners.size(0)),
      static_cast<const int32_t*>(generations.data_ptr()),
      blocks.size(0)};
  NWOR_DISPATCH(tensors, args, audit_hand_out);
}

void audit_publish(Tensor findings, Tensor findings_to) {
  const TensorArgs tensors("audit_publish", "findings", findings);
  const TensorArgs host(tensors.op(), "findings_to", findings_to);
  NWOR_CHECK(!host.on_cuda(), tensors.op(), "findings_to is on CUDA; must be on cpu");
  Finding* from = rows_of<Finding>(tensors, "findings", findings, kFindingColumns);
  Finding* to = rows_of<Finding>(host, "findings_to", findings_to, kFindingColumns);
  NWOR_CHECK(findings.size(0) > 1 && findings_to.size(0) == findings.size(0),
             tensors.op(), "findings and findings_to have ", findings.size(0), " and ",
             findings_to.size(0), " rows; must have as many, and a header");
  const AuditPublishArgs args{reinterpret_cast<FindingsHeader*>(from), from + 1,
                              findings.size(0) - 1,
                              reinterpret_cast<FindingsHeader*>(to), to + 1};
#ifdef NWOR_CUDA
  if (tensors.on_cuda()) {
    check_device_sees(tensors.op(),
                      static_cast<const int64_t*>(findings_to.data_ptr()));
  }
#endif
  NWOR_DISPATCH(tensors, args, audit_publish);
}

}  // namespace nwor
