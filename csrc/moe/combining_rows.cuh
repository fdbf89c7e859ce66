// Layer 1 as a Rows policy of the grouped GEMM: its rows are local and sorted. Tiles are computed in chunks of columns.
// A finished chunk is summed while the next one is computed: for each token of a peer, the weighted sum of its rows is
// sent to the peer's slots; for each own token, it and the peers' contributions are added in rank order. Each warpgroup
// works independently, in units of a block of tokens, whose rows it first looks up. A call ends only after the first
// block of every peer's first chunk has arrived, needed or not (see arriving_rows.cuh).
#pragma once

#include "moe/activation.cuh"
#include "moe/plan.h"
#include "runtime/device/sync.cuh"

namespace flux::moe {

struct CombiningRows {
  struct Params {
    runtime::SymmBuffer symm;
    Layout layout;
    Products products;    // results of the GEMM [max_rows, n], and how they are summed
    ColumnChunks chunks;  // chunks of columns of tiles
    int block_n;          // columns of a tile
    int n;
    int block_rows;           // slot rows that share a signal
    int blocks;               // blocks of each slot
    const int32_t* incoming;  // [world_size][max_tokens]: token of each slot row of a source
    const int32_t* received;  // [world_size]: number of slot rows of a source
    const int32_t* sent;      // [ep_size][max_tokens]: slot row of each own token at a slice, or -1
    void* out;                // [num_tokens, n]
    int num_tokens;
    int communication_ctas;  // CTAs that compute no tiles after the first chunk has been drawn, if others do
  };
  using Call = sync::Call;
  struct Progress {};
  static constexpr bool kInOrder = true, kArrive = false, kCombine = true;

  FLUX_DEVICE static Call begin(const Params& p) {
    if (threadIdx.x == 0 && computes_all(p)) atomicAdd(&p.symm.header()->ctas_begun, 1u);
    return sync::begin_call(p.symm);
  }
  FLUX_DEVICE static uint32_t* tile_counter(const Params& p) { return &p.symm.header()->next_tile; }
  // Tiles must not wait for CTAs that are not resident: another kernel may hold their SMs.
  FLUX_DEVICE static bool may_draw(const Params& p, int drawn, int first_chunk) {
    return computes_all(p) || drawn < first_chunk || ptx::load_relaxed(&p.symm.header()->ctas_begun) == 0;
  }

  FLUX_DEVICE static void stored(const Params& p, int chunk) {
    __threadfence();
    atomicAdd(&p.symm.header()->pieces_pushed[chunk], 1u);
  }

  template <class Element>
  FLUX_DEVICE static void combine(const Params& p, const Call& call, int num_tile_rows, void* memory) {
    const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
    Copies& copies = static_cast<Group*>(memory)[group].copies;
    Block& block = static_cast<Group*>(memory)[group].block;
    const int barrier = gemm::kGroupBarrier + group, rank = p.symm.rank;
    const CommOrder order = {p.layout.world_size, rank, p.blocks, p.chunks.count()};
    const auto draw = [&] { return static_cast<int>(atomicAdd(&p.symm.header()->next_piece, 1u)); };
    int computed = 0;  // number of chunks that this thread knows to be complete
    if (thread == 0) block.drawn = draw();
    ptx::named_barrier_sync(barrier, kGroupThreads);
    while (true) {
      const int index = block.drawn;
      if (index >= order.units()) return;
      const CommUnit unit = order.at(index);
      const bool own = unit.peer == rank;
      const int rows_in_all = own ? p.num_tokens : p.received[unit.peer];
      const int rows = min(p.block_rows, rows_in_all - unit.block * p.block_rows);
      find_rows(p, block, unit, rows, thread);
      bool here = true;
      if (own) here = wait_for_peers(p, call, block, unit, thread);
      // Waits for earlier chunks too: their last tiles may be slower, and this thread may sum them next.
      while (thread == 0 && here && computed <= unit.chunk) {
        here = wait_for_tiles(p, computed, num_tile_rows);
        computed += here;
      }
      const bool whole = ptx::named_barrier_and(barrier, kGroupThreads, here);
      const bool sends = !own && whole && !call.aborted;
      // Draws the next unit before this one is summed, to overlap the latency of the atomic.
      const int next = thread == 0 ? draw() : 0;
      if (own) {
        sum<Element>(p, call, block, copies, unit, rows, whole, thread);
      } else if (sends) {
        send<Element>(p, call, block, copies, unit, rows, thread);
      }
      if (thread == 0) block.drawn = next;
      ptx::named_barrier_sync(barrier, kGroupThreads);
      if (thread == kAnnouncer && sends &&
          unit.block < Layout::blocks_of(p.received[unit.peer], p.block_rows)) {
        const int slot = runtime::slot_index(rank, unit.peer);
        sync::publish(p.symm.signal(unit.peer, slot, word(p, unit.chunk, unit.block)), call.epoch);
      }
    }
  }

  FLUX_DEVICE static void end(const Params& p, const Call& call) {
    runtime::Header* const header = p.symm.header();
    sync::end_call(p.symm, call.epoch, [&] {
      for (int chunk = 0; chunk < p.chunks.count(); ++chunk) header->pieces_pushed[chunk] = 0;
      header->ctas_begun = 0;
    });
  }

 private:
  static constexpr int kGroupThreads = 128;
  static_assert(gemm::kGroupBarrier + 1024 / kGroupThreads <= gemm::kNamedBarriers);
  static constexpr int kAnnouncer = 96;  // the thread that publishes signals; not in the warp that draws
  static constexpr int kNoRow = -1;
  // A thread sums vectors one after the other, in batches of up to kBatch terms; kAhead - 1 batches are in flight.
  static constexpr int kAhead = 4, kBatch = 8;
  static_assert(runtime::kMaxWorldSize - 1 <= kBatch);  // the contributions of all peers fit into one batch
  using Copies = uint4[kAhead][kBatch][kGroupThreads];

  struct alignas(16) Block {
    int positions[kBlockRows][kMaxTopK];  // rows of each token's products, compacted: valid positions first
    float weights[kBlockRows][kMaxTopK];
    int counts[kBlockRows];
    int slot_rows[kBlockRows][runtime::kMaxWorldSize];  // own tokens: slot row of each source, or kNoRow
    int drawn;                                          // the next unit
  };
  struct Group {
    Copies copies;
    Block block;
  };

 public:
  static constexpr int kCombineBytes = (1 + gemm::kNumMathWarpgroups) * sizeof(Group);

 private:
  FLUX_DEVICE static bool computes_all(const Params& p) { return blockIdx.x >= p.communication_ctas; }

  struct Columns {
    int first, vectors;
  };
  FLUX_DEVICE static Columns columns(const Params& p, int chunk) {
    const int first = p.chunks.first(chunk) * p.block_n;
    const int last = min(p.n, first + p.chunks.size(chunk) * p.block_n);
    return {first, (last - first) / kVector};
  }
  FLUX_DEVICE static int word(const Params& p, int chunk, int block) { return chunk * p.blocks + block; }
  FLUX_DEVICE static char* slot_row(const Params& p, const Call& call, int owner, int source, int row) {
    const int64_t index =
        static_cast<int64_t>(runtime::slot_index(source, owner)) * p.layout.max_tokens + row;
    return p.symm.slots(owner, call.epoch) + index * p.n * gemm::kResultBytes;
  }

  // Tiles never wait, so this wait ends as soon as they are computed.
  FLUX_DEVICE static bool wait_for_tiles(const Params& p, int chunk, int num_tile_rows) {
    const uint32_t halves = num_tile_rows * p.chunks.size(chunk) * gemm::kNumMathWarpgroups;
    return sync::wait_signal(
        p.symm, &p.symm.header()->pieces_pushed[chunk], halves,
        {runtime::kGemmGatherRs, static_cast<uint32_t>(p.symm.rank), static_cast<uint32_t>(chunk)});
  }

  // Called by a warpgroup: fills `block` with the rows of the unit's tokens. Half a warp has a token, a lane a choice.
  FLUX_DEVICE static void find_rows(const Params& p, Block& block, const CommUnit& unit, int rows,
                                    int thread) {
    constexpr int kSteps = kBlockRows * kMaxTopK / kGroupThreads;
    const int choice = thread % kMaxTopK, first = thread / kMaxTopK;
    const int begin = unit.block * p.block_rows;
    const int64_t tokens_of_peer = static_cast<int64_t>(unit.peer) * p.layout.max_tokens;
    int tokens[kSteps], positions[kSteps];
    float weights[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int row = step * (kGroupThreads / kMaxTopK) + first;
      tokens[step] = kNoRow;
      if (row < rows && choice < p.products.top_k) {
        // Without expert parallelism, a peer's token that no rank needs has a slot row too, but no sum.
        tokens[step] =
            unit.peer == p.symm.rank ? begin + row : __ldg(p.incoming + tokens_of_peer + begin + row);
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int64_t index = (tokens_of_peer + tokens[step]) * p.products.top_k + choice;
      positions[step] = tokens[step] >= 0 ? __ldg(p.products.positions + index) : kNoRow;
      weights[step] = tokens[step] >= 0 ? __ldg(p.products.weights + index) : 0;
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int row = step * (kGroupThreads / kMaxTopK) + first;
      const uint32_t half = ptx::lane() & kMaxTopK, before = (1u << choice) - 1;
      const bool there = positions[step] >= 0;
      const uint32_t those = __ballot_sync(~0u, there) >> half & 0xFFFFu;
      const int count = __popc(those);
      const int at = there ? __popc(those & before) : count + __popc(~those & before);
      block.positions[row][at] = positions[step];
      block.weights[row][at] = weights[step];
      if (choice == 0) block.counts[row] = count;
    }
  }

  // Waits for the peers' contributions to the block's tokens; of a peer that sends nothing, for its first block.
  FLUX_DEVICE static bool wait_for_peers(const Params& p, const Call& call, Block& block,
                                         const CommUnit& unit, int thread) {
    bool here = true;
    const int row = thread % kBlockRows, token = unit.block * p.block_rows + row;
    for (int source = thread / kBlockRows; source < p.layout.world_size;
         source += kGroupThreads / kBlockRows) {
      int found = kNoRow;
      if (source != p.symm.rank) {
        if (row < p.block_rows && token < p.num_tokens)
          found = p.sent[p.layout.slice_of(source) * p.layout.max_tokens + token];
        const int slot = runtime::slot_index(source, p.symm.rank), sent_block = max(found, 0) / p.block_rows;
        here &= sync::wait_signal(
            p.symm, p.symm.signal(p.symm.rank, slot, word(p, unit.chunk, sent_block)), call.epoch,
            {runtime::kGemmGatherRs, static_cast<uint32_t>(source), static_cast<uint32_t>(sent_block)});
      }
      block.slot_rows[row][source] = found;
    }
    return here;
  }

  // Calls visit(row, column, sum, parts) for each vector of the block that this thread handles. `sum`: over the
  // choices. `parts`: of own tokens, the peers' contributions in rank order, kGroupThreads vectors apart.
  template <class Element, class Visit>
  FLUX_DEVICE static void for_each_sum(const Params& p, const Call& call, const Block& block, Copies& copies,
                                       const CommUnit& unit, int rows, int thread, const Visit& visit) {
    const Columns columns = CombiningRows::columns(p, unit.chunk);
    const int vectors = rows * columns.vectors, rank = p.symm.rank;
    const int peers = unit.peer == rank ? p.layout.world_size - 1 : 0;
    // The last batch of a vector holds the peers' contributions, and up to last_choices choices.
    const int last_choices = kBatch - peers;
    const int batches = 1 + max(0, ceil_div(p.products.top_k - last_choices, kBatch));

    struct Cursor {
      int vector, batch, slot;
    };
    const auto advance = [&](Cursor& cursor) {
      cursor.slot = (cursor.slot + 1) % kAhead;
      if (++cursor.batch < batches) return;
      cursor.batch = 0;
      cursor.vector += kGroupThreads;
    };
    struct Batch {
      int row, column, first_choice, choices;
      bool last;
    };
    const auto batch_at = [&](const Cursor& cursor) -> Batch {
      const int row = cursor.vector / columns.vectors, first = cursor.batch * kBatch;
      const bool last = cursor.batch + 1 == batches;
      return {.row = row,
              .column = columns.first + (cursor.vector - row * columns.vectors) * kVector,
              .first_choice = first,
              .choices = min(block.counts[row] - first, last ? last_choices : kBatch),
              .last = last};
    };

    Cursor asked = {thread, 0, 0}, summed = asked;
    const auto ask = [&] {
      if (asked.vector < vectors) {
        const Batch batch = batch_at(asked);
        auto& to = copies[asked.slot];
        const int64_t offset = static_cast<int64_t>(batch.column) * gemm::kResultBytes;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (i >= batch.choices) break;
          const int64_t position = block.positions[batch.row][batch.first_choice + i];
          const char* const row = p.products.rows + position * p.products.row_bytes;
          ptx::copy_async_16(ptx::smem_addr(&to[i][thread]), row + offset, true);
        }
        for (int i = 0; batch.last && i < peers; ++i) {
          const int source = i < rank ? i : i + 1, found = block.slot_rows[batch.row][source];
          if (found < 0) continue;
          const char* const row = slot_row(p, call, rank, source, found);
          ptx::copy_async_16(ptx::smem_addr(&to[last_choices + i][thread]), row + offset, true);
        }
        advance(asked);
      }
      ptx::copy_async_commit();
    };
#pragma unroll 1
    for (int i = 0; i < kAhead - 1; ++i) ask();
    float total[kVector];
#pragma unroll 1
    for (; summed.vector < vectors; advance(summed)) {
      ask();
      ptx::copy_async_wait<kAhead - 1>();
      const Batch batch = batch_at(summed);
      const auto& here = copies[summed.slot];
      if (summed.batch == 0) {
#pragma unroll
        for (float& t : total) t = 0;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (i >= batch.choices) break;
        add_choice<Element>(here[i][thread], block.weights[batch.row][batch.first_choice + i], total);
      }
      if (batch.last) visit(batch.row, batch.column, total, &here[last_choices][thread]);
    }
  }

  template <class Element>
  FLUX_DEVICE static void send(const Params& p, const Call& call, const Block& block, Copies& copies,
                               const CommUnit& unit, int rows, int thread) {
    char* const slots = slot_row(p, call, unit.peer, p.symm.rank, unit.block * p.block_rows);
    const auto visit = [&](int row, int column, const float (&sum)[kVector], const uint4*) {
      const int64_t at = static_cast<int64_t>(row) * p.n + column;
      *reinterpret_cast<uint4*>(slots + at * gemm::kResultBytes) = gemm::round<Element>(sum);
    };
    for_each_sum<Element>(p, call, block, copies, unit, rows, thread, visit);
  }

  template <class Element>
  FLUX_DEVICE static void sum(const Params& p, const Call& call, const Block& block, Copies& copies,
                              const CommUnit& unit, int rows, bool whole, int thread) {
    char* const out = static_cast<char*>(p.out) +
                      static_cast<int64_t>(unit.block) * p.block_rows * p.n * gemm::kResultBytes;
    const auto visit = [&](int row, int column, const float (&own)[kVector], const uint4* parts) {
      float total[kVector] = {};
#pragma unroll 1
      for (int source = 0; source < p.layout.world_size; ++source) {
        float part[kVector];
        if (source == p.symm.rank) {
#pragma unroll
          for (int j = 0; j < kVector; ++j) part[j] = own[j];
        } else {
          const uint4& sent = *parts;
          parts += kGroupThreads;
          if (block.slot_rows[row][source] < 0) continue;
          gemm::widen<Element>(sent, part);
        }
#pragma unroll
        for (int j = 0; j < kVector; ++j) total[j] += part[j];
      }
      const int64_t at = static_cast<int64_t>(row) * p.n + column;
      // If a wait timed out, the host will raise an error; until then the result is NaN, not a partial sum.
      const uint4 result = whole ? gemm::round<Element>(total) : uint4{~0u, ~0u, ~0u, ~0u};
      *reinterpret_cast<uint4*>(out + at * gemm::kResultBytes) = result;
    };
    for_each_sum<Element>(p, call, block, copies, unit, rows, thread, visit);
  }
};

}  // namespace flux::moe
