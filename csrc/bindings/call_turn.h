// The turns in which the host threads of a process make their calls.
#pragma once

#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_set>
#include <utility>

#include "bindings/core.h"
#include "runtime/launch_table.h"

namespace flux::bindings {

// A fair recursive mutex, in the order of requests: calls on one group must not overtake each other.
class Turn {
 public:
  // Acquires the lock if it is free and no thread waits for it, or if this thread holds it.
  bool try_acquire() {
    const std::lock_guard lock(mutex_);
    if (depth_ > 0 ? holder_ != std::this_thread::get_id() : !waiting_.empty()) return false;
    take();
    return true;
  }

  // Waits for the lock. Calls `poll` about every 50 ms; if it throws, the thread leaves the queue.
  template <class Poll>
  void acquire(Poll&& poll) {
    constexpr auto kPollEvery = std::chrono::milliseconds(50);
    if (try_acquire()) return;
    std::unique_lock lock(mutex_);
    const auto place = waiting_.insert(waiting_.end(), std::this_thread::get_id());
    while (depth_ > 0 || place != waiting_.begin()) {
      if (changed_.wait_for(lock, kPollEvery) == std::cv_status::no_timeout) continue;
      lock.unlock();
      try {
        poll();
      } catch (...) {
        lock.lock();
        waiting_.erase(place);
        changed_.notify_all();
        throw;
      }
      lock.lock();
    }
    waiting_.erase(place);
    take();
  }

  // Called by the holder. Returns true if the lock is now free, false if the holder still has it (recursion).
  bool release() {
    const std::lock_guard lock(mutex_);
    if (--depth_ > 0) return false;
    changed_.notify_all();
    return true;
  }

  int depth() const { return depth_; }  // may be called by the holder only

 private:
  void take() {
    holder_ = std::this_thread::get_id();
    ++depth_;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<std::thread::id> waiting_;  // in order of arrival
  std::thread::id holder_;
  int depth_ = 0;  // number of times that the holder has acquired the lock
};

inline void acquire(Turn& turn) {
  if (turn.try_acquire()) return;
  const pybind11::gil_scoped_release release;
  turn.acquire(check_signals);
}

// Serialises the calls of host threads on a group, and records whether an exception ended a call that peers have seen a
// part of: from `open` until `call` returns, that breaks the group. In C++, so that no KeyboardInterrupt falls between
// the end of a call and its record. Around a call, `hold` keeps the turn for work that is not its own, such as
// autograd's: there only an interrupt breaks the group, because its caller would make the call again.
class CallTurn {
 public:
  explicit CallTurn(pybind11::object refusals) : refusals_(std::move(refusals)) {}

  // args: the function, then its arguments. kHolds: `hold`, else `call`.
  template <bool kHolds>
  PyObject* call(PyObject* const* args, Py_ssize_t count) {
    if (count == 0) throw pybind11::type_error("expected a function, and its arguments");
    acquire(turn_);
    if (turn_.depth() == 1) open_ = false;
    PyObject* const result = PyObject_Vectorcall(args[0], args + 1, count - 1, nullptr);
    if (result != nullptr) {
      leave();
      return result;
    }
    const pybind11::error_already_set error;
    const bool own = !kHolds || !error.matches(PyExc_Exception);  // an interrupt is no Exception
    const bool breaks = open_ && own && !error.matches(refusals_);
    const std::string name = breaks ? error.type().attr("__name__").cast<std::string>() : "";
    leave(breaks ? name.c_str() : nullptr);
    throw error;
  }

  // A call without Python code in it: try_enter, open, leave. False if another thread is inside a call.
  bool try_enter() {
    if (!turn_.try_acquire()) return false;
    if (turn_.depth() == 1) open_ = false;
    return true;
  }
  void open() { open_ = true; }
  // What peers have seen so far is complete, and no part of the call: they do not wait for more.
  void close() { open_ = false; }
  // broken_by: name of the exception that ends an open call, or null.
  void leave(const char* broken_by = nullptr) {
    if (open_ && broken_by != nullptr) broken_by_ = broken_by;
    if (turn_.depth() == 1) open_ = false;
    turn_.release();
  }

  const std::optional<std::string>& broken_by() const { return broken_by_; }
  void forget() { broken_by_.reset(); }

 private:
  Turn turn_;
  pybind11::object refusals_;
  bool open_ = false;  // peers may have seen a part of the running call
  std::optional<std::string> broken_by_;
};

// Of the calls of all groups on one device. Held from the wait for the last call until the launch of the next.
struct LaunchOrder {
  Turn turn;
  std::optional<uint64_t> stream;             // raw stream of the last call
  pybind11::object event = pybind11::none();  // after the last call, if that was on an external stream
  std::unordered_set<uint64_t> lasting;       // raw streams that calls were made on and that nobody destroys

  // Whether what is enqueued on a stream from now on comes after the last call. Lets it wait if both streams last.
  bool follow(const runtime::LaunchTable& table, int device, void* next) {
    if (!event.is_none()) return false;
    const auto raw = reinterpret_cast<uint64_t>(next);
    if (stream == raw) return true;
    if (!stream.has_value() || lasting.count(raw) == 0) return false;
    const pybind11::gil_scoped_release release;  // a record waits if the device's queue is full
    if (!table.follow(device, reinterpret_cast<void*>(*stream), next)) return false;
    stream = raw;
    return true;
  }
};

}  // namespace flux::bindings
