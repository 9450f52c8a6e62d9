// SPDX-License-Identifier: Apache-2.0
//
// The audit's ops: from tensors to launchers. `tables` holds a group's addresses and
// sizes, as AuditedGroup (tables.py) writes them: few arguments, in few calls a step.
// Its owner keeps the tensors behind the addresses; only the size of `tables` can be
// checked.
#include <algorithm>

#include "audit/audit.h"
#include "audit/ops.h"
#include "audit/states.h"
#include "common/check.h"
#include "common/dispatch.h"

namespace nwor {
namespace {

using torch::headeronly::ScalarType;

// The elements of a contiguous array that the host reads or writes.
template <typename Value>
Value* on_host(const char* op, const char* name, const Tensor& tensor,
               int64_t num_dims = 1) {
  const TensorArgs host(op, name, tensor);
  NWOR_CHECK(!host.on_cuda(), op, name, " is on CUDA; must be on cpu");
  return host.values<Value>(name, tensor, num_dims);
}

// One call: the group that it is for, and the device of its other arguments.
struct Call : TensorArgs {
  const AuditGroup& group;
  const AuditPart* parts;
};
Call call_of(const char* op, const Tensor& tables) {
  const auto* const columns = on_host<int64_t>(op, "tables", tables);
  const auto& group = *reinterpret_cast<const AuditGroup*>(columns);
  const int64_t size = tables.size(0);
  NWOR_CHECK(
      size >= kGroupColumns && size == kGroupColumns + group.num_parts * kPartColumns,
      op, "tables has ", size, " entries; must have ", kGroupColumns + 0, ", and ",
      kPartColumns + 0, " for each table of layers");
  const bool on_cuda = group.device >= 0;
  return {TensorArgs(op, "tables", on_cuda ? kCuda : kCpu,
                     on_cuda ? static_cast<int32_t>(group.device) : -1),
          group, reinterpret_cast<const AuditPart*>(columns + kGroupColumns)};
}

// Where the digests of a step go; nullptr if the group takes none.
int64_t* digests_of(const Call& call, const OptionalTensor& digests_to) {
  const AuditGroup& group = call.group;
  NWOR_CHECK(digests_to.has_value() == (group.max_digests > 0), call.op(),
             "digests_to must be given if the group takes digests, and not else");
  if (!digests_to.has_value()) {
    return nullptr;
  }
  auto* const to = on_host<int64_t>(call.op(), "digests_to", *digests_to, 2);
  call.size_is("digests_to", *digests_to, 0, 1 + 2 * group.max_digests, "as digests");
  call.size_is("digests_to", *digests_to, 1, sizeof(BlockDigest) / 8 + group.num_sums(),
               "the columns of digests, and those of contents or the slots of a block, "
               "whichever are more");
  return to;
}

void check_seat(const Call& call, int64_t seat) {
  NWOR_CHECK(seat >= 0 && seat < call.group.num_seats, call.op(), "seat is ", seat,
             "; must be between 0 and ", call.group.num_seats - 1);
}

void check_num_tokens(const Call& call, int64_t num_tokens) {
  NWOR_CHECK(num_tokens >= 0 && num_tokens <= call.group.max_tokens, call.op(),
             "num_tokens is ", num_tokens, "; must be between 0 and ",
             call.group.max_tokens, ", the rows of plan");
}

AuditStep step_of(const Call& call, const Tensor& row_seats,
                  const Tensor& query_start_loc, const Tensor& block_table,
                  int64_t num_reqs, int64_t num_tokens, int64_t step) {
  const auto* const starts = call.values<int32_t>("query_start_loc", query_start_loc);
  const IndexArray seats = call.indices("row_seats", row_seats);
  call.rows_of("block_table", block_table, ScalarType::Int);
  NWOR_CHECK(num_reqs >= 0 && num_reqs <= row_seats.size(0) &&
                 num_reqs < query_start_loc.size(0) && num_reqs <= block_table.size(0),
             call.op(), "num_reqs is ", num_reqs,
             "; row_seats, query_start_loc and block_table have ", row_seats.size(0),
             ", ", query_start_loc.size(0), " and ", block_table.size(0), " rows");
  check_num_tokens(call, num_tokens);
  return {call.group,
          seats,
          starts,
          num_reqs,
          static_cast<const int32_t*>(block_table.data),
          block_table.stride(0),
          block_table.size(1),
          num_tokens,
          step};
}

// Of a step with drafts.
template <typename Args>
void set_acceptance(const Call& call, Args& args, const OptionalTensor& cu_num_logits,
                    const OptionalTensor& sampled_token_ids, int64_t vocab_size,
                    const OptionalTensor& num_rejected) {
  if (!cu_num_logits.has_value()) {
    return;
  }
  args.cu_num_logits = call.values<int32_t>("cu_num_logits", *cu_num_logits);
  args.acceptance = call.acceptance(sampled_token_ids, vocab_size, num_rejected);
  const int64_t num_reqs = args.num_reqs;
  NWOR_CHECK(cu_num_logits->size(0) >= num_reqs && args.acceptance.num_reqs >= num_reqs,
             call.op(), "cu_num_logits has ", cu_num_logits->size(0),
             " entries and the acceptance ", args.acceptance.num_reqs,
             " rows; must have ", num_reqs, ", num_reqs");
}

StatesArgs states_of(const Call& call, AuditStep step, const Tensor& state_tables,
                     const Tensor& metadata) {
  const char* const op = call.op();
  const auto* const columns = on_host<int64_t>(op, "state_tables", state_tables);
  call.size_is("state_tables", state_tables, 0, kStateTablesColumns, "StateTables");
  StatesArgs args{step, *reinterpret_cast<const StateTables*>(columns), {}};
  NWOR_CHECK(args.num_states <= kMaxStates && args.num_groups <= kMaxStateGroups, op,
             "state_tables has ", args.num_states, " states in ", args.num_groups,
             " groups; must have at most ", kMaxStates + 0, " in ",
             kMaxStateGroups + 0);
  NWOR_CHECK(args.num_reqs <= args.num_seats, op, "num_reqs is ", args.num_reqs,
             "; must be at most ", args.num_seats, ", the seats");
  const auto* const rows = on_host<int64_t>(op, "metadata", metadata, 2);
  call.size_is("metadata", metadata, 0, args.num_groups, "the groups of state_tables");
  call.size_is("metadata", metadata, 1, kMetadataColumns, "StateMetadata");
  std::copy_n(reinterpret_cast<const StateMetadata*>(rows), args.num_groups,
              args.metadata);
  return args;
}

}  // namespace

void audit_seat(Tensor tables, Tensor tokens, int64_t seat, int64_t generation,
                int64_t seed, bool opaque, int64_t loads, int64_t handover,
                Tensor features) {
  const Call call = call_of("audit_seat", tables);
  const auto* const of_hit = call.values<int32_t>("tokens", tokens);
  const int64_t length = tokens.size(0);
  check_seat(call, seat);
  const int64_t room = call.group.max_blocks * call.group.block_size;
  NWOR_CHECK(length <= room, call.op(), "tokens has ", length,
             " entries; must have at most ", room, ", the room of a seat");
  const auto* const of_host = on_host<int64_t>(call.op(), "features", features, 2);
  const int64_t num_features = features.size(0);
  NWOR_CHECK(num_features <= kMaxFeatures, call.op(), "features has ", num_features,
             " rows; must have at most ", kMaxFeatures + 0);
  call.size_is("features", features, 1, sizeof(Feature) / 8, "a feature");
  AuditSeatArgs args{call.group,
                     of_hit,
                     seat,
                     {0, 0, generation, opaque ? 1 : 0, length, loads,
                      static_cast<uint64_t>(seed), num_features, -1, handover},
                     {}};
  std::copy_n(reinterpret_cast<const Feature*>(of_host), num_features,
              args.fresh_features);
  NWOR_DISPATCH(call, args, audit);
}

void audit_plan(Tensor tables, Tensor row_seats, Tensor query_start_loc,
                Tensor block_table, int64_t num_reqs, int64_t num_tokens, int64_t step,
                Tensor tokens, Tensor positions, Tensor slot_mapping) {
  const Call call = call_of("audit_plan", tables);
  int64_t num_slots = 0;
  const int64_t* const slots = call.slot_mapping(slot_mapping, &num_slots);
  const AuditPlanArgs args{step_of(call, row_seats, query_start_loc, block_table,
                                   num_reqs, num_tokens, step),
                           call.values<int32_t>("tokens", tokens),
                           call.values<int64_t>("positions", positions), slots};
  NWOR_CHECK(num_tokens <= tokens.size(0) && num_tokens <= positions.size(0) &&
                 num_tokens <= num_slots,
             call.op(), "num_tokens is ", num_tokens,
             "; tokens, positions and slot_mapping have ", tokens.size(0), ", ",
             positions.size(0), " and ", num_slots, " rows");
  NWOR_DISPATCH(call, args, audit);
}

void audit_reseed(Tensor tables, int64_t seat, int64_t delta, int64_t num_tokens) {
  const Call call = call_of("audit_reseed", tables);
  check_seat(call, seat);
  check_num_tokens(call, num_tokens);
  const AuditReseedArgs args{call.group, seat, static_cast<uint64_t>(delta),
                             num_tokens};
  NWOR_DISPATCH(call, args, audit);
}

void audit_resolve(Tensor tables, Tensor row_seats, Tensor query_start_loc,
                   Tensor block_table, int64_t num_reqs, int64_t num_tokens,
                   int64_t step, OptionalTensor cu_num_logits,
                   OptionalTensor sampled_token_ids, int64_t vocab_size,
                   OptionalTensor num_rejected, bool is_undone, OptionalTensor staged,
                   OptionalTensor state_indices, OptionalTensor seat_of_state,
                   OptionalTensor hits, int64_t num_blocks, int64_t num_hit_blocks,
                   Tensor findings_to, OptionalTensor digests_to) {
  const Call call = call_of("audit_resolve", tables);
  const char* const op = call.op();
  auto* const to = on_host<int64_t>(op, "findings_to", findings_to, 2);
  call.size_is("findings_to", findings_to, 0, call.group.capacity + 1, "as findings");
  call.size_is("findings_to", findings_to, 1, sizeof(Finding) / 8, "as findings");
  AuditResolveArgs args{step_of(call, row_seats, query_start_loc, block_table, num_reqs,
                                num_tokens, step),
                        is_undone,
                        {},
                        call.parts,
                        num_blocks,
                        num_hit_blocks,
                        reinterpret_cast<FindingsHeader*>(to),
                        digests_of(call, digests_to)};
  set_acceptance(call, args, cu_num_logits, sampled_token_ids, vocab_size,
                 num_rejected);
  if (staged.has_value()) {
    args.staged = call.saved(*staged);
    args.staged.state_indices = call.state_indices(state_indices, num_reqs);
    call.set_seats(args.staged, seat_of_state);
  }
  if (hits.has_value()) {
    args.hits =
        reinterpret_cast<const AuditHit*>(on_host<int64_t>(op, "hits", *hits, 2));
    args.num_hits = hits->size(0);
    call.size_is("hits", *hits, 1, sizeof(AuditHit) / 8, "a hit");
    for (int64_t i = 0; i < args.num_hits; ++i) {
      NWOR_CHECK(args.hits[i].row >= 0 && args.hits[i].row < num_reqs, op, "hits[", i,
                 "] is of row ", args.hits[i].row, "; must be between 0 and ",
                 num_reqs - 1);
    }
  }
#ifdef NWOR_CUDA
  if (call.on_cuda()) {
    check_device_sees(op, "findings_to", to);
    if (args.digests_to != nullptr) {
      check_device_sees(op, "digests_to", args.digests_to);
    }
  }
#endif
  NWOR_DISPATCH(call, args, audit);
}

void audit_blocks(Tensor tables, int64_t event, Tensor blocks, Tensor values,
                  int64_t step) {
  const Call call = call_of("audit_blocks", tables);
  const AuditGroup& group = call.group;
  const char* const op = call.op();
  const auto* const of_blocks = on_host<int32_t>(op, "blocks", blocks);
  const auto* const of_values = on_host<int64_t>(op, "values", values);
  const int64_t count = blocks.size(0);
  call.size_is("values", values, 0, count, "as blocks");
  NWOR_CHECK(event >= kGiven && event <= kStored, op, "event is ", event,
             "; must be between ", kGiven + 0, " and ", kStored + 0);
  // Numbers of stores, which need room where they are kept; or generations.
  const int64_t most = event == kGiven || group.num_stored > 0 ? kMaxInt32 : 0;
  const int64_t least = event == kGiven ? -most : 0;
  for (int64_t i = 0; i < count; ++i) {
    NWOR_CHECK(of_blocks[i] >= 0 && of_blocks[i] < group.num_blocks, op, "blocks[", i,
               "] is ", of_blocks[i], "; must be between 0 and ", group.num_blocks - 1);
    NWOR_CHECK(of_values[i] >= least && of_values[i] <= most, op, "values[", i, "] is ",
               of_values[i], "; must be between ", least, " and ", most,
               most == 0 ? ", because the group keeps no stored blocks" : "");
  }
  AuditBlocksArgs args{group, static_cast<BlockEvent>(event), step, 0, {}, {}};
  for (int64_t first = 0; first < count; first += args.num_events) {
    args.num_events = std::min(count - first, AuditBlocksArgs::kMaxCount);
    std::copy_n(of_blocks + first, args.num_events, args.blocks);
    std::copy_n(of_values + first, args.num_events, args.values);
    NWOR_DISPATCH(call, args, audit);
  }
}

void audit_states_read(Tensor tables, Tensor row_seats, Tensor query_start_loc,
                       Tensor block_table, int64_t num_reqs, int64_t num_tokens,
                       int64_t step, Tensor state_tables, Tensor metadata) {
  const Call call = call_of("audit_states_read", tables);
  const AuditStep of_step = step_of(call, row_seats, query_start_loc, block_table,
                                    num_reqs, num_tokens, step);
  const AuditStatesReadArgs args{states_of(call, of_step, state_tables, metadata)};
  NWOR_DISPATCH(call, args, audit);
}

void audit_states_written(Tensor tables, Tensor row_seats, Tensor query_start_loc,
                          Tensor block_table, int64_t num_reqs, int64_t num_tokens,
                          int64_t step, Tensor state_tables, Tensor metadata,
                          OptionalTensor cu_num_logits,
                          OptionalTensor sampled_token_ids, int64_t vocab_size,
                          OptionalTensor num_rejected, OptionalTensor digests_to) {
  const Call call = call_of("audit_states_written", tables);
  const AuditStep of_step = step_of(call, row_seats, query_start_loc, block_table,
                                    num_reqs, num_tokens, step);
  AuditStatesWrittenArgs args{states_of(call, of_step, state_tables, metadata)};
  set_acceptance(call, args, cu_num_logits, sampled_token_ids, vocab_size,
                 num_rejected);
  if (digests_to.has_value()) {
    const char* const op = call.op();
    args.digests_to = on_host<int64_t>(op, "digests_to", *digests_to, 4);
    const int64_t num_columns = sizeof(BlockDigest) / 8 + args.max_in_group;
    call.size_is("digests_to", *digests_to, 0, 2, "written and loaded");
    call.size_is("digests_to", *digests_to, 1, args.num_seats, "the seats");
    call.size_is("digests_to", *digests_to, 2, args.num_recurrent, "the groups");
    call.size_is("digests_to", *digests_to, 3, num_columns, "a digest and samples");
#ifdef NWOR_CUDA
    if (call.on_cuda()) {
      check_device_sees(op, "digests_to", args.digests_to);
    }
#endif
  }
  NWOR_DISPATCH(call, args, audit);
}

void audit_snapshot(Tensor tables, bool again) {
  const Call call = call_of("audit_snapshot", tables);
  const AuditSnapshotArgs args{call.group, call.parts, again};
  NWOR_DISPATCH(call, args, audit);
}

}  // namespace nwor
