// The symmetric workspace of a group: the same layout on every rank, accessible through plain pointers. Python
// allocates and maps the memory (python/flux/comm). Several ranks can share one GPU, as in most kernel tests.
//
//   [0, 16384)                 header: words only the owning rank touches, but for `gave_up`
//   then signal_bytes          signals: one u32 epoch for each half tile of each slot, written by peers
//   then two slot buffers      slot_bytes each; call number `epoch` uses buffer epoch & 1, which is free: this rank
//                              finished call epoch - 1 only after every peer had started it, and so finished epoch - 2
//   then two exchange buffers  exchange_bytes each, likewise; between calls every word of them is kAbsent
#pragma once

#include <cstdint>

#include "runtime/macros.h"

namespace flux::runtime {

constexpr int kMaxWorldSize = 8;
constexpr int64_t kHeaderBytes = 16384;

// The content of an exchange buffer where no data has arrived: two 16-bit NaNs that no conversion from fp32 produces.
constexpr uint32_t kAbsent = 0xFFFFFFFF;

constexpr int kMaxStagedChunks = 64;

// In the headers of calls and in the records of timeouts. Python takes them from here.
enum OpId : uint32_t {
  kGemmRs = 1,
  kAgGemm,
  kAllGather,
  kGemmAr,
  kAllReduce,
  kRoute,
  kAgScatterGemm,
  kGemmGatherRs,
  kReduceScatter,
};

// From the id 1 on.
constexpr const char* kOpNames[] = {
    "gemm_rs",        "ag_gemm",   "all_gather",          "gemm_ar",
    "all_reduce",     "moe.route", "moe.ag_scatter_gemm", "moe.gemm_gather_rs",
    "reduce_scatter",
};
static_assert(sizeof(kOpNames) / sizeof(kOpNames[0]) == kReduceScatter);

enum class Failure : uint32_t {
  kNone,
  kTimeout,     // a wait has timed out
  kPeerGaveUp,  // a peer has recorded a failure; its copies may have overwritten what this call has read
  kOverlap,     // another launch has used the workspace at the same time
};

struct ErrorRecord {
  uint32_t code;  // a Failure; written last
  uint32_t op, rank, peer, tile, expected, seen;
  uint32_t reserved[9];
};
static_assert(sizeof(ErrorRecord) == 64);

struct Header {
  uint32_t epoch;       // calls this rank has finished
  uint32_t ctas_done;   // CTAs of the running call that have finished
  uint32_t aborted;     // sticky: a wait timed out, later calls must not wait again
  uint32_t next_tile;   // of the running call: clusters of CTAs draw their next tile here
  uint32_t next_piece;  // of the running call: CTAs that push rows draw what to push next
  // Of the running call: CTAs that have begun, and have left (gemm/finish.cuh); or, in MoE layer 1, that only compute.
  uint32_t ctas_begun;
  uint32_t next_share;  // of the running call: CTAs draw which share of a sum they process
  uint32_t gave_up;     // the rank, plus one, of a peer that has recorded a failure; written by that peer
  uint32_t reserved[56];
  // For each chunk that a copy engine sends: the number of finished pieces. The copy stream resets it.
  uint32_t pieces_staged[kMaxStagedChunks];
  // For each block of rows and each peer: the number of pushed pieces. The CTA that pushes the last one resets it.
  uint32_t pieces_pushed[kHeaderBytes / 4 - 128];
};
constexpr int kMaxPushBlocks = sizeof(Header::pieces_pushed) / sizeof(uint32_t);
static_assert(sizeof(Header) == kHeaderBytes);

// The number of the slot of `source` on `owner`: a rank has a slot for each peer, and none for itself.
FLUX_HD int slot_index(int source, int owner) { return source < owner ? source : source - 1; }

struct SymmBuffer {
  int32_t rank;
  int32_t world_size;
  uint64_t peers[kMaxWorldSize];  // base address of each rank's copy, in this process's address space
  int64_t signal_bytes;
  int64_t slot_bytes;
  int64_t exchange_bytes;
  ErrorRecord* error;
  uint64_t timeout_ns;

  FLUX_HD Header* header() const { return reinterpret_cast<Header*>(peers[rank]); }
  // Each source has its own region of words: a word of different sources in calls of different shapes could be
  // signalled by the faster source for the slower one.
  FLUX_HD uint32_t* signal(int peer, int slot, int index) const {
    const int words_per_slot = static_cast<int>(signal_bytes / sizeof(uint32_t)) / (world_size - 1);
    return reinterpret_cast<uint32_t*>(peers[peer] + kHeaderBytes) + slot * words_per_slot + index;
  }
  FLUX_HD char* slots(int peer, uint32_t epoch) const {
    return reinterpret_cast<char*>(peers[peer] + kHeaderBytes + signal_bytes + (epoch & 1) * slot_bytes);
  }
  FLUX_HD char* exchange(int peer, uint32_t epoch) const {
    return reinterpret_cast<char*>(peers[peer] + kHeaderBytes + signal_bytes + 2 * slot_bytes +
                                   (epoch & 1) * exchange_bytes);
  }
};

// --- sums over ranks ---

// The layout of a sum over ranks: every rank has a matrix [m, n] of 16-bit elements. Defines for each 16-byte vector
// which rank sums it, and where contributions and sums are stored. Shared by kernels, host, CPU path and tests.
//
//   one-shot   every rank sends its whole matrix to all ranks, and every rank sums everything
//   two-shot   every rank owns a shard of columns. Each rank sends every shard to its owner; the owner sums the shard
//              and sends the sum to all ranks
//   scatter    every rank owns a shard of rows. Each rank sends every shard to its owner, which sums and keeps it
//
// An exchange area has one slot for each rank's contribution (a sum without a GEMM reads its own part in place), and
// two-shot then the sums that owners have sent.
struct Exchange {
  enum class Mode { kOneShot, kTwoShot, kScatter };

  int m, n;  // n is a multiple of kVector
  int world_size;
  Mode mode;
  int shard;  // columns (two-shot) or rows (scatter) of each owner; one-shot: 0

  static constexpr int kVector = 8;  // elements of 16 bytes
  static constexpr int kElementBytes = 2;

  FLUX_HD int owner(int row, int column) const {
    return mode == Mode::kTwoShot ? column / shard : row / shard;
  }
  FLUX_HD int slot_rows() const { return mode == Mode::kScatter ? shard : m; }
  FLUX_HD int slot_columns() const { return mode == Mode::kTwoShot ? shard : n; }
  // Rows and columns that `rank` sums. At an edge these may be fewer than a shard, or none.
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
  FLUX_HD int64_t bytes() const {
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
  return {.m = m, .n = n, .world_size = world_size, .mode = mode, .shard = shard};
}

// Treats a matrix as one row, but in two-shot mode an owner gets whole rows of it.
inline Exchange make_row_exchange(int m, int n, int world_size, Exchange::Mode mode) {
  Exchange exchange = make_exchange(1, m * n, world_size, mode);
  if (mode == Exchange::Mode::kTwoShot) exchange.shard = (m + world_size - 1) / world_size * n;
  return exchange;
}

// Picks the faster all-reduce: one-shot moves more data, two-shot adds a trip over the link.
inline Exchange::Mode all_reduce_mode(int64_t m, int64_t n, int world_size) {
  constexpr double kLinkBytesPerUs = 310e3;
  constexpr double kHopUs = 1.7;  // from a store to the peer's poll
  const double bytes = static_cast<double>(m) * n * Exchange::kElementBytes;
  // A sum of its own of two ranks sends as much either way (docs/design/decode.md#what-made-the-sum-faster).
  constexpr double kAloneTwoShotBytes = 2.5e6;
  if (world_size == 2 && m == 1 && bytes >= kAloneTwoShotBytes) return Exchange::Mode::kTwoShot;
  const double one_shot = bytes * (world_size - 1);
  const double two_shot = 2 * bytes * (world_size - 1) / world_size;
  return one_shot <= two_shot + kHopUs * kLinkBytesPerUs ? Exchange::Mode::kOneShot
                                                         : Exchange::Mode::kTwoShot;
}

// A scatter whose contributions, `rows` rows of n elements for each owner, travel as int8. 128 elements of a row are a
// group with one scale; four groups, which a warp quantises at once, are a unit: 16-byte vectors of numbers and one of
// scales. No word of them is kAbsent: numbers travel as bytes of q + 127, and scales have no sign.
struct Int8Scatter {
  int rows, n;
  int world_size;

  static constexpr int kGroup = 128;
  static constexpr int kUnitGroups = 4;

  FLUX_HD int groups_of_row() const { return (n + kGroup - 1) / kGroup; }
  FLUX_HD int groups() const { return rows * groups_of_row(); }
  FLUX_HD int units() const { return (groups() + kUnitGroups - 1) / kUnitGroups; }
  // Bytes from the start of the owner's exchange area.
  FLUX_HD int64_t numbers(int source, int unit) const {
    return source * slot_bytes() + static_cast<int64_t>(unit) * kUnitGroups * kGroup;
  }
  FLUX_HD int64_t scales(int source, int unit) const {
    return numbers(source, units()) + static_cast<int64_t>(unit) * kUnitGroups * sizeof(float);
  }
  FLUX_HD int64_t slot_bytes() const {
    return static_cast<int64_t>(units()) * kUnitGroups * (kGroup + sizeof(float));
  }
  FLUX_HD int64_t bytes() const { return world_size * slot_bytes(); }
};

}  // namespace flux::runtime
