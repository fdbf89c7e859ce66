// The tile scheduler of the grouped GEMM. One warp looks up the next tile: its rows, where they are, and whether they
// have arrived. Loaders that did this themselves stalled (docs/design/moe.md#the-grouped-gemm). A tile is drawn when
// the loader requests one, not as soon as the queue has room: else an idle CTA could not have it.
#pragma once

#include "gemm/sm90/smem.cuh"

namespace flux::moe {

struct Job {
  int num_rows;      // valid rows, at most kBlockM; 0: no more tiles
  int first_row;     // first row in the result
  int first_column;  // first column in the result
  int expert;
  int chunk;  // chunk of columns
};

struct JobQueue {
  static constexpr int kEntries = 2;
  static constexpr int kWords = sizeof(Job) / 4;
  static constexpr int kPlaces = gemm::kBlockM;  // locations of the tile's rows, if they must be gathered
  static constexpr int kBytes = 8 * (2 * kEntries + 1) + 4 * kEntries * (kPlaces + kWords);

  uint32_t base;

  __device__ uint32_t full(int entry) const { return base + entry * 8; }
  __device__ uint32_t empty(int entry) const { return full(kEntries + entry); }
  __device__ uint32_t wanted() const { return full(2 * kEntries); }
  __device__ uint32_t place(int entry, int row) const {
    return full(2 * kEntries + 1) + 4 * (entry * kPlaces + row);
  }
  __device__ uint32_t word(int entry, int i) const { return place(kEntries, 0) + 4 * (entry * kWords + i); }

  // Called by one thread before any barrier is used.
  __device__ void init(int readers) const {
    for (int entry = 0; entry < kEntries; ++entry) {
      ptx::mbarrier_init(full(entry), 32);
      ptx::mbarrier_init(empty(entry), readers);
    }
    ptx::mbarrier_init(wanted(), 1);
    ptx::fence_mbarrier_init();
  }
};

// The state of a thread that reads jobs. Readers and writers arrive themselves, so that racecheck sees the order.
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

  // Called by all lanes of a warp; lane 0 reads. Returns the rows of the next tile, or 0.
  FLUX_DEVICE int rows(const JobQueue& queue) {
    ptx::mbarrier_wait(queue.full(cursor.index), cursor.phase);
    __syncwarp();  // a lane that still waits would miss the phase if lane 0 let the entry be filled again
    int rows = 0;
    if (ptx::lane() == 0) {
      rows = static_cast<int>(ptx::load_shared(queue.word(cursor.index, 0)));
      ptx::mbarrier_arrive(queue.empty(cursor.index));
    }
    cursor.advance();
    return __shfl_sync(~0u, rows, 0);
  }
};

struct JobWriter {
  gemm::RingCursor<JobQueue::kEntries> cursor;
  uint32_t wanted_phase = 0;

  FLUX_DEVICE void wait_for_room(const JobQueue& queue) const {
    ptx::mbarrier_wait(queue.empty(cursor.index), cursor.phase ^ 1);
  }
  // Called by all lanes after each has written its locations.
  FLUX_DEVICE void put(const JobQueue& queue, const Job& job) {
    if (ptx::lane() == 0) {
      const int words[] = {job.num_rows, job.first_row, job.first_column, job.expert, job.chunk};
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
