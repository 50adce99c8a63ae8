#include "copy.h"

#include <c10/util/Exception.h>

#include <mutex>
#include <optional>
#include <utility>

#include "memory.h"
#include "stream.h"
#include "view.h"

namespace fake {
namespace {

thread_local int kernels_of_this_thread = 0;

struct Failure {
  std::int64_t after;
  bool asynchronous;
};

std::mutex copy_mutex;
Counts copies_counted;
std::optional<Failure> planned_failure;

enum class Outcome { kSuccess, kFailsWhenQueued, kFailsWhenRun };

Outcome next_outcome(const char* kind, std::size_t nbytes) {
  if (kernels_of_this_thread > 0) {
    return Outcome::kSuccess;
  }
  const std::lock_guard lock(copy_mutex);
  if (planned_failure.has_value() && planned_failure->after-- == 0) {
    const bool asynchronous = std::exchange(planned_failure, std::nullopt)->asynchronous;
    return asynchronous ? Outcome::kFailsWhenRun : Outcome::kFailsWhenQueued;
  }
  copies_counted.copies[kind].push_back(nbytes);
  return Outcome::kSuccess;
}

[[noreturn]] void throw_failure(const char* kind) {
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, 1,
                              std::string("fake: injected failure of a copy (") + kind + ")");
}

// The work of one copy, which counts and may fail.
simulated::Operation copy_operation(const char* kind, const at::Tensor& destination,
                                    const at::Tensor& source) {
  ViewPair pair{View(destination), View(source)};
  switch (next_outcome(kind, pair.first.nbytes())) {
    case Outcome::kFailsWhenQueued:
      throw_failure(kind);
    case Outcome::kFailsWhenRun:
      return [kind] { throw_failure(kind); };
    case Outcome::kSuccess:
      break;
  }
  return [pair = std::move(pair)] { copy(pair); };
}

void copy_with_host(const at::Tensor& destination, const at::Tensor& source, bool non_blocking) {
  const bool to_host = destination.is_cpu();
  const at::Tensor& host = to_host ? destination : source;
  const OnDevice on_device((to_host ? source : destination).device().index());
  const auto stream = current_stream(current_device());
  enqueue(stream, copy_operation(to_host ? "d2h" : "h2d", destination, source));
  if (non_blocking && is_pinned(host.data_ptr())) {
    host_allocator().record_event(host.data_ptr(), host.storage().data_ptr().get_context(), stream);
  } else {
    stream.synchronize();
  }
}

// As CUDA: the source's current stream copies, in order with both current streams.
void copy_between_devices(const at::Tensor& destination, const at::Tensor& source) {
  const OnDevice on_device(source.device().index());
  const auto stream = current_stream(current_device());
  const auto other = current_stream(destination.device().index());
  if (other != stream) {
    queue_of(stream).wait_for(queue_of(other).mark());
  }
  enqueue(stream, copy_operation("d2d", destination, source));
  if (other != stream) {
    queue_of(other).wait_for(queue_of(stream).mark());
  }
}

}  // namespace

void copy_between(const at::Tensor& destination, const at::Tensor& source, bool non_blocking) {
  const at::Tensor expanded = source.expand_as(destination);
  if (destination.numel() == 0) {
    return;
  }
  TORCH_CHECK((destination.is_cpu() || destination.is_privateuseone()) &&
                  (source.is_cpu() || source.is_privateuseone()),
              "fake: cannot copy from ", source.device(), " to ", destination.device());
  if (destination.is_cpu() || source.is_cpu()) {
    copy_with_host(destination, expanded, non_blocking);
  } else {
    copy_between_devices(destination, expanded);
  }
}

at::Tensor cpu_copy_of(const at::Tensor& tensor) {
  const CopiesOfKernel kernel;
  return tensor.cpu();
}

CopiesOfKernel::CopiesOfKernel() { ++kernels_of_this_thread; }
CopiesOfKernel::~CopiesOfKernel() { --kernels_of_this_thread; }

void count(const std::string& name) {
  const std::lock_guard lock(copy_mutex);
  ++copies_counted.others[name];
}

Counts counts() {
  const std::lock_guard lock(copy_mutex);
  return copies_counted;
}

void reset_counts() {
  const std::lock_guard lock(copy_mutex);
  copies_counted = {};
}

void fail_copy(std::int64_t after, bool asynchronous) {
  const std::lock_guard lock(copy_mutex);
  planned_failure = Failure{after, asynchronous};
}

void fail_no_copy() {
  const std::lock_guard lock(copy_mutex);
  planned_failure.reset();
}

}  // namespace fake
