// SPDX-License-Identifier: Apache-2.0
#include "prepared.h"

#include <algorithm>
#include <exception>
#include <string>
#include <vector>

#include "check.h"
#include "cuda_stream.h"
#include "launch.h"
#include "shadow.h"

namespace nwor {
namespace {

// What a handle points to.
struct Prepared {
  int device;
  int64_t num_launches;
  std::vector<int64_t> columns;  // of the step being read; room for either
  // One of these pairs.
  std::vector<LogArgs> logs;
  std::vector<RestoreArgs> restores;
  std::vector<ShadowStageArgs> stages;
  std::vector<ShadowCommitArgs> commits;
  // Of each stage.
  std::vector<StageStepLaunch> places;
  int64_t most_reqs = 0;
};

template <typename T>
T* at(int64_t address) {
  return reinterpret_cast<T*>(address);
}

constexpr int64_t kColumn = sizeof(int64_t);

int64_t num_log_columns(int64_t num_launches) {
  return (sizeof(LogStep) + num_launches * sizeof(LogStepLaunch)) / kColumn;
}

int64_t num_restore_columns(int64_t) {
  return sizeof(RestoreStep) / kColumn;
}

int64_t num_stage_columns(int64_t num_launches) {
  return (sizeof(StageStep) + num_launches * sizeof(StageStepLaunch)) / kColumn;
}

NworInterpreter python;

constexpr const char* kLog = "log_cache_slots";
constexpr const char* kRestore = "restore_rejected_drafts";
constexpr const char* kStage = "stage";
constexpr const char* kCommit = "commit_draft_layer";

void* refuse_number(const char* op, int64_t num_arguments,
                    const std::string& num_expected) {
  const std::string text = std::string(op) + ": got " + std::to_string(num_arguments) +
                           " arguments, expected " + num_expected;
  python.set_error(python.runtime_error, text.c_str());
  return nullptr;
}

// What an enqueue returns for a step that is not what was prepared.
constexpr char kOther[] = "";

// Reads as many columns as num_columns(number of launches) says, calls
// enqueue(prepared, columns), which returns nullptr, kOther or the text of a failure,
// and answers the interpreter. Its lock is kept: a launch enqueues, or where the queue
// is full waits for the device, which in vLLM waits for no thread of Python. To give
// the lock up is to wait for it where another thread takes it in between.
template <typename NumColumns, typename Enqueue>
void* call(const char* op, void* const* arguments, int64_t num_arguments,
           const NumColumns& num_columns, const Enqueue& enqueue) {
  if (num_arguments < 1) {
    return refuse_number(op, num_arguments, "at least 1");
  }
  const int64_t handle = python.as_long_long(arguments[0]);
  if (handle == -1 && python.error_occurred() != nullptr) {
    return nullptr;
  }
  Prepared& all = *reinterpret_cast<Prepared*>(handle);
  const int64_t num_expected = 1 + num_columns(all.num_launches);
  if (num_arguments != num_expected) {
    return refuse_number(op, num_arguments, std::to_string(num_expected));
  }
  for (int64_t i = 1; i < num_arguments; ++i) {
    const int64_t value = python.as_long_long(arguments[i]);
    if (value == -1 && python.error_occurred() != nullptr) {
      return nullptr;
    }
    all.columns[i - 1] = value;
  }
  const char* failure = enqueue(all, all.columns.data());
  if (failure != nullptr && failure != kOther) {
    python.set_error(python.runtime_error, failure);
    return nullptr;
  }
  void* const is_prepared = failure == nullptr ? python.yes : python.no;
  python.add_reference(is_prepared);
  return is_prepared;
}

const char* keep(const std::exception& error) {
  thread_local std::string text;
  text = error.what();
  return text.c_str();
}

const char* enqueue_log(Prepared& all, const int64_t* columns) {
  const auto* step = reinterpret_cast<const LogStep*>(columns);
  const auto* launches = reinterpret_cast<const LogStepLaunch*>(step + 1);
  try {
    void* const stream = current_cuda_stream(kLog, all.device);
    for (LogArgs& args : all.logs) {
      args.num_drafts = step->num_drafts;
      args.batch = {
          at<const int64_t>(launches->slot_mapping),
          launches->num_tokens,
          {at<const void>(step->logits_indices), step->logits_indices_are_int64 != 0},
          step->num_logits,
          at<const int32_t>(step->cu_num_logits),
          step->num_reqs};
      ++launches;
      log_cache_slots_cuda(args, all.device, stream);
    }
    return nullptr;
  } catch (const std::exception& error) {
    return keep(error);
  }
}

Acceptance acceptance_of(const RestoreStep& step) {
  return {at<const int32_t>(step.sampled_token_ids),
          step.row_stride,
          step.column_stride,
          step.num_columns,
          step.vocab_size,
          at<const int32_t>(step.num_rejected),
          step.num_reqs};
}

bool is_prepared(const Prepared& all, const StageStep& step) {
  const auto* launches = reinterpret_cast<const StageStepLaunch*>(&step + 1);
  bool is_same = step.num_reqs <= all.most_reqs;
  for (size_t i = 0; i < all.stages.size(); ++i) {
    const ShadowStageArgs& args = all.stages[i];
    is_same = is_same &&
              at<const int32_t>(step.query_start_loc) == args.query_start_loc &&
              at<const int32_t>(step.seq_lens) == args.seq_lens &&
              launches[i].slot_mappings == all.places[i].slot_mappings &&
              launches[i].block_table == all.places[i].block_table;
  }
  return is_same;
}

const char* enqueue_stage(Prepared& all, const int64_t* columns) {
  const auto* step = reinterpret_cast<const StageStep*>(columns);
  if (!is_prepared(all, *step)) {
    return kOther;
  }
  try {
    void* const stream = current_cuda_stream(kStage, all.device);
    for (size_t i = 0; i < all.stages.size(); ++i) {
      ShadowStageArgs& args = all.stages[i];
      args.cu_num_logits = at<const int32_t>(step->cu_num_logits);
      args.saved.seats = {at<const void>(step->seats), step->seats_are_int64 != 0};
      args.num_reqs = step->num_reqs;
      args.step = static_cast<int32_t>(step->step);
      all.commits[i].saved = args.saved;
      stage_cuda(args, all.device, stream);
    }
    return nullptr;
  } catch (const std::exception& error) {
    return keep(error);
  }
}

const char* enqueue_commit(Prepared& all, const int64_t* columns) {
  const auto* step = reinterpret_cast<const RestoreStep*>(columns);
  auto* counters_to = at<int64_t>(step->counters_to);
  try {
    void* const stream = current_cuda_stream(kCommit, all.device);
    for (ShadowCommitArgs& args : all.commits) {
      args.acceptance = acceptance_of(*step);
      args.num_reqs = step->num_reqs;
      args.counters_to = counters_to;
      if (counters_to != nullptr) {
        counters_to += kNumCounters;
      }
      commit_draft_layer_cuda(args, all.device, stream);
    }
    return nullptr;
  } catch (const std::exception& error) {
    return keep(error);
  }
}

const char* enqueue_restore(Prepared& all, const int64_t* columns) {
  const auto* step = reinterpret_cast<const RestoreStep*>(columns);
  auto* counters_to = at<int64_t>(step->counters_to);
  const char* failure = nullptr;
  for (RestoreArgs& args : all.restores) {
    args.num_drafts = step->num_drafts;
    args.acceptance = acceptance_of(*step);
    args.counters_to = counters_to;
    if (counters_to != nullptr) {
      counters_to += kNumCounters;
    }
    try {
      void* const stream = current_cuda_stream(kRestore, all.device);
      restore_rejected_drafts_cuda(args, all.device, stream);
    } catch (const std::exception& error) {
      failure = keep(error);
    }
  }
  return failure;
}

}  // namespace
}  // namespace nwor

void nwor_prepared_version(int64_t* found) {
  constexpr int64_t kVersion = 6;
  found[0] = kVersion;
  found[1] = sizeof(nwor::PreparedLaunch) / nwor::kColumn;
  found[2] = sizeof(nwor::LogStep) / nwor::kColumn;
  found[3] = sizeof(nwor::LogStepLaunch) / nwor::kColumn;
  found[4] = sizeof(nwor::RestoreStep) / nwor::kColumn;
  found[5] = sizeof(nwor::PreparedPages) / nwor::kColumn;
  found[6] = sizeof(nwor::StageStep) / nwor::kColumn;
  found[7] = sizeof(nwor::StageStepLaunch) / nwor::kColumn;
}

const char* nwor_prepared_load(int64_t device) {
  try {
    nwor::load_cow_kernels("start-up", static_cast<int>(device));
    nwor::load_shadow_kernels("start-up", static_cast<int>(device));
    return nullptr;
  } catch (const std::exception& error) {
    return nwor::keep(error);
  }
}

void* nwor_prepared_new(const nwor::PreparedLaunch* launches, int64_t num_launches,
                        int64_t device) {
  auto* prepared = new nwor::Prepared{static_cast<int>(device), num_launches};
  for (int64_t i = 0; i < num_launches; ++i) {
    const nwor::PreparedLaunch& launch = launches[i];
    nwor::LogArgs log{};
    log.table = {nwor::at<const nwor::LayerRow>(launch.table), launch.num_layers};
    log.log = {nwor::at<uint8_t>(launch.undo_log), launch.row_stride, launch.row_bytes,
               nwor::at<int64_t>(launch.log_slots),
               nwor::at<int32_t>(launch.log_windows)};
    nwor::RestoreArgs restore{};
    restore.table = log.table;
    restore.log = log.log;
    restore.counters = nwor::at<int64_t>(launch.counters);
    prepared->logs.push_back(log);
    prepared->restores.push_back(restore);
  }
  prepared->columns.resize(std::max(nwor::num_log_columns(num_launches),
                                    nwor::num_restore_columns(num_launches)));
  return prepared;
}

void* nwor_prepared_pages_new(const nwor::PreparedPages* launches, int64_t num_launches,
                              int64_t device) {
  auto* prepared = new nwor::Prepared{static_cast<int>(device), num_launches};
  for (int64_t i = 0; i < num_launches; ++i) {
    const nwor::PreparedPages& launch = launches[i];
    nwor::ShadowStageArgs stage{};
    stage.table = {nwor::at<const nwor::LayerRow>(launch.table), launch.num_layers};
    stage.blocks = {nwor::at<int32_t>(launch.block_table),
                    launch.num_rows,
                    launch.row_stride,
                    launch.width,
                    nwor::at<int64_t>(launch.slot_mapping),
                    launch.num_slots_mapped};
    stage.saved = {nwor::at<int32_t>(launch.saved), launch.num_seats, launch.span, {}};
    stage.query_start_loc = nwor::at<const int32_t>(launch.query_start_loc);
    stage.seq_lens = nwor::at<const int32_t>(launch.seq_lens);
    stage.first_entry = launch.first_entry;
    stage.num_real_entries = launch.num_real_entries;
    stage.entry_tokens = launch.entry_tokens;
    stage.patches = true;
    nwor::ShadowCommitArgs commit{};
    commit.table = stage.table;
    commit.blocks = stage.blocks;
    commit.saved = stage.saved;
    commit.counters = nwor::at<int64_t>(launch.counters);
    commit.entry_tokens = launch.entry_tokens;
    commit.undoes = true;
    prepared->stages.push_back(stage);
    prepared->commits.push_back(commit);
    prepared->places.push_back({launch.slot_mappings, launch.block_table});
    prepared->most_reqs =
        i == 0 ? launch.most_reqs : std::min(prepared->most_reqs, launch.most_reqs);
  }
  prepared->columns.resize(std::max(nwor::num_stage_columns(num_launches),
                                    nwor::num_restore_columns(num_launches)));
  return prepared;
}

void nwor_prepared_free(void* prepared) {
  delete static_cast<nwor::Prepared*>(prepared);
}

void nwor_prepared_interpreter(const NworInterpreter* interpreter) {
  nwor::python = *interpreter;
}

void* nwor_prepared_log(void*, void* const* arguments, int64_t num_arguments) {
  return nwor::call(nwor::kLog, arguments, num_arguments, nwor::num_log_columns,
                    nwor::enqueue_log);
}

void* nwor_prepared_stage(void*, void* const* arguments, int64_t num_arguments) {
  return nwor::call(nwor::kStage, arguments, num_arguments, nwor::num_stage_columns,
                    nwor::enqueue_stage);
}

void* nwor_prepared_commit(void*, void* const* arguments, int64_t num_arguments) {
  return nwor::call(nwor::kCommit, arguments, num_arguments, nwor::num_restore_columns,
                    nwor::enqueue_commit);
}

void* nwor_prepared_restore(void*, void* const* arguments, int64_t num_arguments) {
  return nwor::call(nwor::kRestore, arguments, num_arguments, nwor::num_restore_columns,
                    nwor::enqueue_restore);
}
