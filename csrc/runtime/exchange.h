// How ranks sum matrices [m, n] of 16-bit elements that each of them has: where a vector of 16 bytes goes, who
// sums it, and where the sum goes. Shared by kernels, host, CPU path and tests.
//
//   one-shot   every rank sends all of its matrix to all ranks, and each sums all of it
//   two-shot   columns are dealt to ranks in shards: each rank sends every shard to its owner, who sums it and
//              sends the sum to all ranks
//   scatter    rows are dealt to ranks: each rank sends every row to its owner, who sums and keeps it
//
// An exchange area on each rank holds what ranks contributed, one slot a source (its own included, so that
// nothing is special about it; only a sum without a GEMM reads its own part where it lies), and after the slots,
// where there are any, the sums that owners have sent. At its end CTAs of one rank tell each other about rows that they
// share.
#pragma once

#include <cstdint>

#include "runtime/macros.h"

namespace flux::runtime {

struct Exchange {
  enum class Mode { kOneShot, kTwoShot, kScatter };

  int m, n;  // n is a multiple of kVector
  int world_size;
  Mode mode;
  int shard;  // columns (two-shot) or rows (scatter) of each owner; one-shot: 0

  static constexpr int kVector = 8;  // elements of 16 bytes
  static constexpr int kElementBytes = 2;
  static constexpr int kMeetings = 2048;

  FLUX_HD int owner(int row, int column) const {
    return mode == Mode::kTwoShot ? column / shard : row / shard;
  }
  FLUX_HD int slot_rows() const { return mode == Mode::kScatter ? shard : m; }
  FLUX_HD int slot_columns() const { return mode == Mode::kTwoShot ? shard : n; }
  // Rows and columns that `rank` sums; an edge may leave it fewer than a shard, or none.
  FLUX_HD int first_row(int rank) const { return mode == Mode::kScatter ? rank * shard : 0; }
  FLUX_HD int first_column(int rank) const { return mode == Mode::kTwoShot ? rank * shard : 0; }
  FLUX_HD int columns_of(int rank) const {
    const int left = n - first_column(rank);
    return left < 0 ? 0 : left < slot_columns() ? left : slot_columns();
  }

  // Bytes from the start of the owner's exchange area.
  FLUX_HD int64_t contribution(int source, int owner, int row, int column) const {
    const int64_t slot_row = static_cast<int64_t>(source) * slot_rows() + row - first_row(owner);
    return (slot_row * slot_columns() + column - first_column(owner)) * kElementBytes;
  }
  FLUX_HD int64_t result(int row, int column) const {
    return contribution_bytes() + (static_cast<int64_t>(row) * n + column) * kElementBytes;
  }
  FLUX_HD int64_t contribution_bytes() const {
    return static_cast<int64_t>(world_size) * slot_rows() * slot_columns() * kElementBytes;
  }
  // A vector from one to another of the CTAs that have parts of a row; at most kMeetings of them.
  FLUX_HD int64_t meeting(int row, int parts, int from, int to) const {
    return sum_bytes() + ((row * parts + from) * parts + to) * kVector * kElementBytes;
  }
  FLUX_HD int64_t bytes() const { return sum_bytes() + kMeetings * kVector * kElementBytes; }

 private:
  FLUX_HD int64_t sum_bytes() const {
    const int64_t results = mode == Mode::kTwoShot ? static_cast<int64_t>(m) * n * kElementBytes : 0;
    return contribution_bytes() + results;
  }
};

inline Exchange make_exchange(int m, int n, int world_size, Exchange::Mode mode) {
  constexpr int kVector = Exchange::kVector;
  int shard = 0;
  if (mode == Exchange::Mode::kTwoShot) {
    shard = (n / kVector + world_size - 1) / world_size * kVector;
  } else if (mode == Exchange::Mode::kScatter) {
    shard = m / world_size;
  }
  return {m, n, world_size, mode, shard};
}

// A matrix as one row, of which a two-shot owner gets whole rows of the matrix. Fits where a matrix fits that has as many
// rows for each rank.
inline Exchange make_row_exchange(int m, int n, int world_size, Exchange::Mode mode) {
  Exchange exchange = make_exchange(1, m * n, world_size, mode);
  if (mode == Exchange::Mode::kTwoShot) exchange.shard = (m + world_size - 1) / world_size * n;
  return exchange;
}

// Whichever gets an all-reduce done sooner: one-shot sends more, two-shot waits twice.
inline Exchange::Mode all_reduce_mode(int64_t m, int64_t n, int world_size) {
  constexpr double kLinkBytesPerUs = 310e3;
  constexpr double kHopUs = 1.7;  // a store to a peer, and its poll
  const double bytes = static_cast<double>(m) * n * Exchange::kElementBytes;
  // Two ranks send as much either way. A sum by itself, which has one row, touches local memory less often two-shot: of
  // 1.5, 3 and 6 MiB 8.0, 12.6 and 21.4 us, and not 7.9, 12.8 and 22.8; in the launch of a GEMM it is no sooner
  // (benchmarks/results/tuning/2026-11-22-all_reduce-threads-tp2-2xH200.json). Behind one, 8 MiB take 3 to 5 us less
  // (benchmarks/results/tuning/2026-11-23-sum-launches-tp2-2xH200.json).
  constexpr double kAloneTwoShotBytes = 2.5e6;
  if (world_size == 2 && m == 1 && bytes >= kAloneTwoShotBytes) return Exchange::Mode::kTwoShot;
  const double one_shot = bytes * (world_size - 1);
  const double two_shot = 2 * bytes * (world_size - 1) / world_size;
  return one_shot <= two_shot + kHopUs * kLinkBytesPerUs ? Exchange::Mode::kOneShot
                                                         : Exchange::Mode::kTwoShot;
}

}  // namespace flux::runtime
