// Launches in threads of the host, of one rank and of several.
#pragma once

#include <condition_variable>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

// What main() returns, with so many threads in each of so many CTAs; body() -> whether all was right.
template <class Body>
int run_program(int threads, int ctas, const Body& body) {
  blockDim.x = threads;
  gridDim.x = ctas;
  const bool exact = body();
  if (exact) std::printf("all exact\n");
  return exact ? 0 : 1;
}

// Threads that run one body after the other: to start and to end one takes ThreadSanitizer a millisecond.
class Threads {
 public:
  explicit Threads(int count) {
    for (int i = 0; i < count; ++i) threads_.emplace_back([this, i] { serve(i); });
  }
  ~Threads() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  int count() const { return static_cast<int>(threads_.size()); }

  // Returns when body(i) has returned in all of them.
  void run(std::function<void(int)> body) {
    std::unique_lock lock(mutex_);
    body_ = std::move(body);
    running_ = count();
    ++runs_;
    changed_.notify_all();
    done_.wait(lock, [&] { return running_ == 0; });
  }

 private:
  void serve(int index) {
    for (int next = 1;; ++next) {
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return over_ || runs_ == next; });
        if (over_) return;
      }
      body_(index);
      const std::lock_guard lock(mutex_);
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_, done_;
  std::function<void(int)> body_;
  int runs_ = 0, running_ = 0;
  bool over_ = false;
  std::vector<std::thread> threads_;
};

// Runs body(shared memory) in every thread of all CTAs, as a launch does. The launches of a rank share threads.
template <class Body>
void launch(const Body& body) {
  thread_local std::unique_ptr<Threads> all;
  const int threads = static_cast<int>(blockDim.x), ctas = static_cast<int>(gridDim.x);
  std::vector<std::unique_ptr<Cta>> grid;
  for (int i = 0; i < ctas; ++i) grid.push_back(std::make_unique<Cta>(threads));
  if (!all || all->count() != ctas * threads) all = std::make_unique<Threads>(ctas * threads);
  all->run([&](int i) {
    blockIdx.x = i / threads;
    threadIdx.x = i % threads;
    cta = grid[blockIdx.x].get();
    body(static_cast<void*>(cta->shared.data()));
  });
}

// Each rank runs its calls in a thread of the host of its own; body(rank) -> whether all was right.
template <class Body>
bool for_all_ranks(int world_size, const Body& body) {
  std::vector<char> exact(world_size);
  std::vector<std::thread> hosts;
  for (int rank = 0; rank < world_size; ++rank) {
    hosts.emplace_back([&, rank] { exact[rank] = body(rank); });
  }
  for (std::thread& host : hosts) host.join();
  bool all = true;
  for (const char good : exact) all &= good != 0;
  return all;
}
