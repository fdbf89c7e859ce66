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
    __shared__ bool whole;
    const Layout& layout = p.layout;
    const int rank = p.symm.rank;
    const CommOrder order = {layout.world_size, rank, layout.max_blocks(), p.chunks.count()};
    while (true) {
      if (threadIdx.x == 0) drawn = static_cast<int>(atomicAdd(&p.symm.header()->next_piece, 1u));
      __syncthreads();
      const int index = drawn;
      if (index >= order.units()) return;
      const CommUnit unit = order.at(index);
      if (threadIdx.x == 0) {
        whole = wait_for_tiles(p, unit.chunk, num_tile_rows) &&
                (unit.peer != rank || wait_for_peers(p, call, unit));
      }
      __syncthreads();
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

  // Slot rows of tokens do not exceed their numbers: blocks up to the tokens' own hold all of them.
  FLUX_DEVICE static bool wait_for_peers(const Params& p, const Call& call, const CommUnit& unit) {
    bool here = true;
    for (int source = 0; source < p.layout.world_size && here; ++source) {
      if (source == p.symm.rank) continue;
      const int slot = Layout::slot_index(source, p.symm.rank);
      const int blocks = Layout::blocks_of(p.sending[p.layout.slice_of(source)]);
      for (int block = 0; block <= unit.block && block < blocks && here; ++block) {
        here =
            sync::wait_signal(p.symm, p.symm.signal(p.symm.rank, slot, word(p, unit.chunk, block)),
                              call.epoch, {kOp, static_cast<uint32_t>(source), static_cast<uint32_t>(block)});
      }
    }
    return here;
  }

  template <class Element>
  FLUX_DEVICE static void send(const Params& p, const Call& call, const CommUnit& unit) {
    const auto [first, vectors] = columns(p, unit.chunk);
    const int begin = unit.block * kBlockRows;
    const int rows = min(kBlockRows, p.received[unit.peer] - begin);
    for (int i = threadIdx.x; i < rows * vectors; i += blockDim.x) {
      const int row = begin + i / vectors, column = first + i % vectors * kVector;
      const int token = p.incoming[unit.peer * p.layout.max_tokens + row];
      if (token < 0) continue;  // without expert parallelism a token that nobody needs has a row too
      float total[kVector];
      sum_choices<Element>(p.products, static_cast<int64_t>(unit.peer) * p.layout.max_tokens + token, column,
                           total);
      *reinterpret_cast<uint4*>(slot_row(p, call, unit.peer, p.symm.rank, row) +
                                column * gemm::kElementBytes) = gemm::round<Element>(total);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence_system();
      const int slot = Layout::slot_index(p.symm.rank, unit.peer);
      sync::signal(p.symm.signal(unit.peer, slot, word(p, unit.chunk, unit.block)), call.epoch);
    }
  }

  template <class Element>
  FLUX_DEVICE static void sum(const Params& p, const Call& call, const CommUnit& unit, bool whole) {
    const auto [first, vectors] = columns(p, unit.chunk);
    const int begin = unit.block * kBlockRows, rank = p.symm.rank;
    const int tokens = min(kBlockRows, p.num_tokens - begin);
    for (int i = threadIdx.x; i < tokens * vectors; i += blockDim.x) {
      const int token = begin + i / vectors, column = first + i % vectors * kVector;
      float total[kVector] = {};
      for (int source = 0; source < p.layout.world_size; ++source) {
        float part[kVector];
        if (source == rank) {
          sum_choices<Element>(p.products, static_cast<int64_t>(rank) * p.layout.max_tokens + token, column,
                               part);
        } else {
          const int row = p.sent[p.layout.slice_of(source) * p.layout.max_tokens + token];
          if (row < 0) continue;
          const char* src = slot_row(p, call, rank, source, row) + column * gemm::kElementBytes;
          gemm::widen<Element>(__ldcg(reinterpret_cast<const uint4*>(src)), part);
        }
#pragma unroll
        for (int j = 0; j < kVector; ++j) total[j] += part[j];
      }
      // The host will raise; until then nobody shall mistake what was summed for a result.
      const uint4 result = whole ? gemm::round<Element>(total) : uint4{~0u, ~0u, ~0u, ~0u};
      const int64_t at = (static_cast<int64_t>(token) * p.n + column) * gemm::kElementBytes;
      *reinterpret_cast<uint4*>(static_cast<char*>(p.out) + at) = result;
    }
  }
};

}  // namespace flux::moe
