// SPDX-License-Identifier: Apache-2.0
#include "prepared.h"

#include <exception>
#include <string>
#include <vector>

#include "check.h"
#include "launch.h"

extern "C" __attribute__((weak)) int32_t
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace nwor {
namespace {

struct Prepared {
  int device;
  std::vector<LogArgs> logs;
  std::vector<RestoreArgs> restores;
};

template <typename T>
T* at(int64_t address) {
  return reinterpret_cast<T*>(address);
}

void* current_stream(const char* op, int device) {
  void* stream = nullptr;
  NWOR_CHECK(aoti_torch_get_current_cuda_stream != nullptr &&
                 aoti_torch_get_current_cuda_stream(device, &stream) == 0,
             op, "this PyTorch has no current CUDA stream");
  return stream;
}

NworInterpreter python;

// Reads the columns, calls enqueue(prepared, columns), which returns nullptr or a text,
// and answers the interpreter. Its lock is kept: a launch enqueues, or where the queue
// is full waits for the device, which in vLLM waits for no thread of Python. To give
// the lock up is to wait for it where another thread takes it in between.
template <typename Enqueue>
void* call(void* const* arguments, int64_t num_arguments, const Enqueue& enqueue) {
  constexpr int64_t kMostArguments = 256;
  int64_t values[kMostArguments];
  if (num_arguments < 1 || num_arguments > kMostArguments) {
    python.set_error(python.runtime_error, "number of arguments is out of range");
    return nullptr;
  }
  for (int64_t i = 0; i < num_arguments; ++i) {
    values[i] = python.as_long_long(arguments[i]);
    if (values[i] == -1 && python.error_occurred() != nullptr) {
      return nullptr;
    }
  }
  const char* failure = enqueue(*reinterpret_cast<Prepared*>(values[0]), values + 1);
  if (failure != nullptr) {
    python.set_error(python.runtime_error, failure);
    return nullptr;
  }
  python.add_reference(python.none);
  return python.none;
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
    void* const stream = current_stream("log_cache_slots", all.device);
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

const char* enqueue_restore(Prepared& all, const int64_t* columns) {
  const auto* step = reinterpret_cast<const RestoreStep*>(columns);
  auto* counters_to = at<int64_t>(step->counters_to);
  const char* failure = nullptr;
  for (RestoreArgs& args : all.restores) {
    args.num_drafts = step->num_drafts;
    args.acceptance = {at<const int32_t>(step->sampled_token_ids),
                       step->row_stride,
                       step->column_stride,
                       step->num_columns,
                       step->vocab_size,
                       at<const int32_t>(step->num_rejected),
                       step->num_reqs};
    args.counters_to = counters_to;
    if (counters_to != nullptr) {
      counters_to += kNumCounters;
    }
    try {
      void* const stream = current_stream("restore_rejected_drafts", all.device);
      restore_rejected_drafts_cuda(args, all.device, stream);
    } catch (const std::exception& error) {
      failure = keep(error);
    }
  }
  return failure;
}

constexpr int64_t kColumn = sizeof(int64_t);

}  // namespace
}  // namespace nwor

void nwor_prepared_version(int64_t* found) {
  constexpr int64_t kVersion = 2;
  found[0] = kVersion;
  found[1] = sizeof(nwor::PreparedLaunch) / nwor::kColumn;
  found[2] = sizeof(nwor::LogStep) / nwor::kColumn;
  found[3] = sizeof(nwor::LogStepLaunch) / nwor::kColumn;
  found[4] = sizeof(nwor::RestoreStep) / nwor::kColumn;
}

const char* nwor_prepared_load(int64_t device) {
  try {
    nwor::load_cow_kernels("start-up", static_cast<int>(device));
    return nullptr;
  } catch (const std::exception& error) {
    return nwor::keep(error);
  }
}

void* nwor_prepared_new(const nwor::PreparedLaunch* launches, int64_t num_launches,
                        int64_t device) {
  auto* prepared = new nwor::Prepared{static_cast<int>(device), {}, {}};
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
  return prepared;
}

void nwor_prepared_free(void* prepared) {
  delete static_cast<nwor::Prepared*>(prepared);
}

void nwor_prepared_interpreter(const NworInterpreter* interpreter) {
  nwor::python = *interpreter;
}

void* nwor_prepared_log(void*, void* const* arguments, int64_t num_arguments) {
  return nwor::call(arguments, num_arguments, nwor::enqueue_log);
}

void* nwor_prepared_restore(void*, void* const* arguments, int64_t num_arguments) {
  return nwor::call(arguments, num_arguments, nwor::enqueue_restore);
}
