// Layer 1 as Rows of a grouped GEMM: its rows are here, in order. What is computed is summed, a chunk of columns
// behind the tiles: for each token of a peer its choices' rows times their weights, sent to the peer's slots; for
// each own token the same, and what peers have sent for it, in rank order.
//
// A call ends only after the first block of every peer's first chunk, needed or not (arriving_rows.cuh says why).
#pragma once

#include "moe/combine.cuh"
#include "moe/plan.h"
#include "runtime/device/sync.cuh"

namespace flux::moe {

struct CombiningRows {
  struct Params {
    runtime::SymmBuffer symm;
    Layout layout;
    Products products;    // what the GEMM writes [max_rows, n], and how it is summed
    ColumnChunks chunks;  // of tiles
    int block_n;          // columns of a tile
    int n;
    const int32_t* incoming;  // [world_size][max_tokens]: token of each slot row of a source
    const int32_t* received;  // [world_size]: how many
    const int32_t* sent;      // [ep_size][max_tokens]: slot row of each own token at a slice, or -1
    const int32_t* sending;   // [ep_size]: how many
    void* out;                // [num_tokens, n]
    int num_tokens;
    int communication_ctas;  // that compute nothing once the first chunk is drawn
  };
  using Call = sync::Call;
  static constexpr uint32_t kOp = 8;
  static constexpr bool kInOrder = true, kArrive = false, kCombine = true;

  FLUX_DEVICE static Call begin(const Params& p) { return sync::begin_call(p.symm); }
  FLUX_DEVICE static uint32_t* tile_counter(const Params& p) { return &p.symm.header()->next_tile; }
  FLUX_DEVICE static bool may_draw(const Params& p, int drawn, int first_chunk) {
    return blockIdx.x >= p.communication_ctas || drawn < first_chunk;
  }

  FLUX_DEVICE static void stored(const Params& p, int chunk) {
    __threadfence();
    atomicAdd(&p.symm.header()->pieces_pushed[chunk], 1u);
  }

  template <class Element>
  FLUX_DEVICE static void combine(const Params& p, const Call& call, int num_tile_rows) {
    __shared__ int drawn;
    const Layout& layout = p.layout;
    const int rank = p.symm.rank;
    const CommOrder order = {layout.world_size, rank, layout.max_blocks(), p.chunks.count()};
    while (true) {
      if (threadIdx.x == 0) drawn = static_cast<int>(atomicAdd(&p.symm.header()->next_piece, 1u));
      __syncthreads();
      const int index = drawn;
      if (index >= order.units()) return;
      const CommUnit unit = order.at(index);
      bool here = threadIdx.x != 0 || wait_for_tiles(p, unit.chunk, num_tile_rows);
      if (unit.peer == rank) here &= wait_for_peers(p, call, unit);
      const bool whole = __syncthreads_and(here);
      if (unit.peer == rank) {
        sum<Element>(p, call, unit, whole);
      } else if (whole && unit.block < Layout::blocks_of(p.received[unit.peer])) {
        send<Element>(p, call, unit);
      }
      __syncthreads();
    }
  }

  FLUX_DEVICE static void end(const Params& p, const Call& call) {
    sync::end_call(p.symm, call.epoch, [&] {
      for (int chunk = 0; chunk < p.chunks.count(); ++chunk) p.symm.header()->pieces_pushed[chunk] = 0;
    });
  }

 private:
  struct Columns {
    int first, vectors;
  };
  FLUX_DEVICE static Columns columns(const Params& p, int chunk) {
    const int first = p.chunks.first(chunk) * p.block_n;
    const int last = min(p.n, first + p.chunks.size(chunk) * p.block_n);
    return {first, (last - first) / kVector};
  }
  FLUX_DEVICE static int word(const Params& p, int chunk, int block) {
    return chunk * p.layout.max_blocks() + block;
  }
  FLUX_DEVICE static char* slot_row(const Params& p, const Call& call, int owner, int source, int row) {
    const int64_t index = static_cast<int64_t>(Layout::slot_index(source, owner)) * p.layout.max_tokens + row;
    return p.symm.slots(owner, call.epoch) + index * p.n * gemm::kElementBytes;
  }

  // Tiles wait for nobody, so this ends as soon as they are computed.
  FLUX_DEVICE static bool wait_for_tiles(const Params& p, int chunk, int num_tile_rows) {
    const uint32_t halves = num_tile_rows * p.chunks.size(chunk) * gemm::kNumMathWarpgroups;
    return sync::wait_signal(p.symm, &p.symm.header()->pieces_pushed[chunk], halves,
                             {kOp, static_cast<uint32_t>(p.symm.rank), static_cast<uint32_t>(chunk)});
  }

  // Slot rows of tokens do not exceed their numbers: blocks up to the tokens' own hold all of them. Each thread waits
  // for others.
  FLUX_DEVICE static bool wait_for_peers(const Params& p, const Call& call, const CommUnit& unit) {
    bool here = true;
    for (int source = 0; source < p.layout.world_size; ++source) {
      if (source == p.symm.rank) continue;
      const int slot = Layout::slot_index(source, p.symm.rank);
      const int blocks = min(unit.block + 1, Layout::blocks_of(p.sending[p.layout.slice_of(source)]));
      for (int block = threadIdx.x; block < blocks; block += blockDim.x) {
        here &=
            sync::wait_signal(p.symm, p.symm.signal(p.symm.rank, slot, word(p, unit.chunk, block)),
                              call.epoch, {kOp, static_cast<uint32_t>(source), static_cast<uint32_t>(block)});
      }
    }
    return here;
  }

  // Vectors that a thread sums at a time: with four choices each, 256 bytes in flight, by which some tens of SMs
  // keep up with the others' tiles.
  static constexpr int kEach = 4;

  // Calls visit(row of the block, column, number below kEach) for this thread's share of a block from `begin` on,
  // kEach times before each call of after().
  template <class Visit, class After>
  FLUX_DEVICE static void for_each_vector(const Columns& columns, int rows, Visit visit, After after) {
    const int count = rows * columns.vectors;
    for (int base = threadIdx.x; base < count; base += kEach * blockDim.x) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int i = base + e * static_cast<int>(blockDim.x);
        const int row = i / columns.vectors;
        visit(i < count, row, columns.first + (i - row * columns.vectors) * kVector, e);
      }
      after();
    }
  }

  template <class Element>
  FLUX_DEVICE static void send(const Params& p, const Call& call, const CommUnit& unit) {
    const int begin = unit.block * kBlockRows;
    const int64_t tokens_of_peer = static_cast<int64_t>(unit.peer) * p.layout.max_tokens;
    Vector vectors[kEach];
    int rows[kEach];
    for_each_vector(
        columns(p, unit.chunk), min(kBlockRows, p.received[unit.peer] - begin),
        [&](bool there, int row, int column, int e) {
          rows[e] = begin + row;
          // Without expert parallelism a token that nobody needs has a row too, and is none.
          const int token = there ? p.incoming[tokens_of_peer + rows[e]] : -1;
          vectors[e] = {token < 0 ? -1 : tokens_of_peer + token, column};
        },
        [&] {
          float sums[kEach][kVector];
          sum_choices<Element>(p.products, vectors, sums);
#pragma unroll
          for (int e = 0; e < kEach; ++e) {
            if (vectors[e].token < 0) continue;
            *reinterpret_cast<uint4*>(slot_row(p, call, unit.peer, p.symm.rank, rows[e]) +
                                      vectors[e].column * gemm::kElementBytes) =
                gemm::round<Element>(sums[e]);
          }
        });
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence_system();
      const int slot = Layout::slot_index(p.symm.rank, unit.peer);
      sync::signal(p.symm.signal(unit.peer, slot, word(p, unit.chunk, unit.block)), call.epoch);
    }
  }

  template <class Element>
  FLUX_DEVICE static void sum(const Params& p, const Call& call, const CommUnit& unit, bool whole) {
    const int begin = unit.block * kBlockRows, rank = p.symm.rank;
    Vector vectors[kEach];
    for_each_vector(
        columns(p, unit.chunk), min(kBlockRows, p.num_tokens - begin),
        [&](bool there, int row, int column, int e) {
          vectors[e] = {there ? static_cast<int64_t>(rank) * p.layout.max_tokens + begin + row : -1, column};
        },
        [&] {
          float own[kEach][kVector], total[kEach][kVector] = {};
          sum_choices<Element>(p.products, vectors, own);
          for (int source = 0; source < p.layout.world_size; ++source) {
#pragma unroll
            for (int e = 0; e < kEach; ++e) {
              if (vectors[e].token < 0) continue;
              float part[kVector];
              if (source != rank) {
                const int token = static_cast<int>(vectors[e].token) - rank * p.layout.max_tokens;
                const int row = p.sent[p.layout.slice_of(source) * p.layout.max_tokens + token];
                if (row < 0) continue;
                const char* src =
                    slot_row(p, call, rank, source, row) + vectors[e].column * gemm::kElementBytes;
                gemm::widen<Element>(__ldcg(reinterpret_cast<const uint4*>(src)), part);
              }
#pragma unroll
              for (int j = 0; j < kVector; ++j) total[e][j] += source == rank ? own[e][j] : part[j];
            }
          }
#pragma unroll
          for (int e = 0; e < kEach; ++e) {
            if (vectors[e].token < 0) continue;
            const int64_t token = vectors[e].token - static_cast<int64_t>(rank) * p.layout.max_tokens;
            // The host will raise; until then nobody shall mistake what was summed for a result.
            const uint4 result = whole ? gemm::round<Element>(total[e]) : uint4{~0u, ~0u, ~0u, ~0u};
            *reinterpret_cast<uint4*>(static_cast<char*>(p.out) +
                                      (token * p.n + vectors[e].column) * gemm::kElementBytes) = result;
          }
        });
  }
};

}  // namespace flux::moe
