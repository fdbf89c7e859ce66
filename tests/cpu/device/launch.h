// Launches in threads of the host, of one rank and of several.
#pragma once

#include <cstdio>
#include <memory>
#include <thread>
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

// Runs body(shared memory) in every thread of all CTAs, as a launch does.
template <class Body>
void launch(const Body& body) {
  const int threads = static_cast<int>(blockDim.x), ctas = static_cast<int>(gridDim.x);
  std::vector<std::unique_ptr<Cta>> grid;
  for (int i = 0; i < ctas; ++i) grid.push_back(std::make_unique<Cta>(threads));
  std::vector<std::thread> all;
  for (int i = 0; i < ctas * threads; ++i) {
    all.emplace_back([&, i] {
      blockIdx.x = i / threads;
      threadIdx.x = i % threads;
      cta = grid[blockIdx.x].get();
      body(static_cast<void*>(cta->shared.data()));
    });
  }
  for (std::thread& thread : all) thread.join();
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
