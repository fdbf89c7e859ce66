// What a CTA of the grouped GEMM computes next, and all that its roles must know of it. One warp does nothing but ask:
// for a number, for the tile with that number, for its expert's rows, where they lie, whether they have arrived. Each
// is a trip to memory, and loaders that asked by themselves stood still meanwhile (docs/design/moe.md).
//
// It asks when the loader says so, not as soon as there is room in the queue: a tile drawn long before its turn is one
// that a free CTA cannot have.
#pragma once

#include "gemm/smem.cuh"

namespace flux::moe {

struct Job {
  int num_rows;      // of the tile's kBlockM, those that there are; 0: no more tiles
  int first_row;     // of the result
  int first_column;  // of the result
  int weight_row;    // that its first column is computed from
  int chunk;         // of columns
};

// Lies in shared memory from `base` on.
struct JobQueue {
  static constexpr int kEntries = 2;
  static constexpr int kWords = sizeof(Job) / 4;
  static constexpr int kPlaces = gemm::kBlockM;  // where the rows of the tile lie, if they must be gathered
  static constexpr int kBytes = 8 * (2 * kEntries + 1) + 4 * kEntries * (kPlaces + kWords);

  uint32_t base;

  __device__ uint32_t full(int entry) const { return base + entry * 8; }
  __device__ uint32_t empty(int entry) const { return full(kEntries + entry); }
  __device__ uint32_t wanted() const { return full(2 * kEntries); }
  __device__ uint32_t place(int entry, int row) const {
    return full(2 * kEntries + 1) + 4 * (entry * kPlaces + row);
  }
  __device__ uint32_t word(int entry, int i) const { return place(kEntries, 0) + 4 * (entry * kWords + i); }

  // One thread, before anybody uses a barrier.
  __device__ void init(int readers) const {
    for (int entry = 0; entry < kEntries; ++entry) {
      ptx::mbarrier_init(full(entry), 32);
      ptx::mbarrier_init(empty(entry), readers);
    }
    ptx::mbarrier_init(wanted(), 1);
    ptx::fence_mbarrier_init();
  }
};

// What a thread that reads jobs keeps. Who reads an entry gives it back itself, and who writes one says so itself:
// racecheck can follow that.
struct JobReader {
  gemm::RingCursor<JobQueue::kEntries> cursor;

  FLUX_DEVICE Job read(const JobQueue& queue) {
    ptx::mbarrier_wait(queue.full(cursor.index), cursor.phase);
    const auto word = [&](int i) { return static_cast<int>(ptx::load_shared(queue.word(cursor.index, i))); };
    return {word(0), word(1), word(2), word(3), word(4)};
  }
  FLUX_DEVICE int place(const JobQueue& queue, int row) const {
    return static_cast<int>(ptx::load_shared(queue.place(cursor.index, row)));
  }
  FLUX_DEVICE void give_back(const JobQueue& queue) {
    ptx::mbarrier_arrive(queue.empty(cursor.index));
    cursor.advance();
  }

  // A warp, of which lane 0 reads: whether there is another tile.
  FLUX_DEVICE bool more(const JobQueue& queue) {
    ptx::mbarrier_wait(queue.full(cursor.index), cursor.phase);
    uint32_t rows = 0;
    if (ptx::lane() == 0) {
      rows = ptx::load_shared(queue.word(cursor.index, 0));
      ptx::mbarrier_arrive(queue.empty(cursor.index));
    }
    cursor.advance();
    return __shfl_sync(~0u, rows, 0) != 0;
  }
};

// The warp that asks.
struct JobWriter {
  gemm::RingCursor<JobQueue::kEntries> cursor;
  uint32_t wanted_phase = 0;

  FLUX_DEVICE void wait_for_room(const JobQueue& queue) const {
    ptx::mbarrier_wait(queue.empty(cursor.index), cursor.phase ^ 1);
  }
  // All lanes, when each has written its places.
  FLUX_DEVICE void put(const JobQueue& queue, const Job& job) {
    if (ptx::lane() == 0) {
      const int words[] = {job.num_rows, job.first_row, job.first_column, job.weight_row, job.chunk};
#pragma unroll
      for (int i = 0; i < JobQueue::kWords; ++i) ptx::store_shared(queue.word(cursor.index, i), words[i]);
    }
    ptx::mbarrier_arrive(queue.full(cursor.index));
    cursor.advance();
  }
  FLUX_DEVICE void wait_until_wanted(const JobQueue& queue) {
    ptx::mbarrier_wait(queue.wanted(), wanted_phase);
    wanted_phase ^= 1;
  }
};

}  // namespace flux::moe
