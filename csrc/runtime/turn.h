// A lock that host threads get in the order in which they ask, and that its holder may take again: calls on one
// group must not overtake each other, as the peers serve them in that order.
#pragma once

#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>
#include <thread>

namespace flux::runtime {

class Turn {
 public:
  // Takes the lock if that needs no waiting.
  bool try_acquire() {
    const std::lock_guard lock(mutex_);
    if (depth_ > 0 ? holder_ != std::this_thread::get_id() : !waiting_.empty()) return false;
    take();
    return true;
  }

  // `poll` is called about every 50 ms of waiting; if it throws, the thread gives its place up.
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

  // Of the holder only. Returns whether it has given the lock away, which it may have taken several times.
  bool release() {
    const std::lock_guard lock(mutex_);
    if (--depth_ > 0) return false;
    changed_.notify_all();
    return true;
  }

  int depth() const { return depth_; }  // of the holder only

 private:
  void take() {
    holder_ = std::this_thread::get_id();
    ++depth_;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<std::thread::id> waiting_;  // in order of arrival
  std::thread::id holder_;
  int depth_ = 0;  // how often its holder has taken it
};

}  // namespace flux::runtime
