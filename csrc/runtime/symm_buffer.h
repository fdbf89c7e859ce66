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

}  // namespace flux::runtime
