// A fair recursive mutex: host threads acquire it in the order of their requests, because calls on one group must not
// overtake each other.
#pragma once

#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>
#include <thread>

namespace flux::runtime {

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

}  // namespace flux::runtime
