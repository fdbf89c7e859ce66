// Grouped GEMM: rows sorted by expert, each times the weight of its expert. A sibling of gemm/sm90_gemm.cuh, with
// the same mainloop, stages and slabs, for rows of x that may lie anywhere and results that end in the middle of a
// tile.
//
//   loaders  warps 0 and 1          A and B by TMA, one thread; or, if rows of x must be gathered, 16 bytes of A a
//                                   thread, row after row
//   storers  warps 2 and 3          one for each math warpgroup: its slabs to the rows that there are
//   math     warpgroups 1 and 2     wgmma, then the activation
//
// Rows lets a row be anywhere:
//
//   struct Params
//   struct Call                     what a thread learns once a launch
//   begin(params) -> Call
//   kInOrder                        sorted rows are those of x
//   at(params, call, row) -> pointer
//                                   otherwise, what sorted row number `row` is made of; asked once a tile
//   tile_counter(params)            where CTAs draw their next tile, zero at launch; null: by a fixed stride
//   kArrive                         some rows come from peers
//   kCombine                        results are summed and sent as soon as a chunk of columns is complete
//
// where kArrive
//
//   num_pushers(params)             CTAs that send before they compute
//   push(params, call)              all threads of such a CTA
//   struct Progress                 what each loader thread remembers
//   admit(params, call, progress, row, thread, threads) -> bool
//                                   the loaders: wait for all rows of an expert up to this one
//
// where kCombine
//
//   may_draw(params, tiles_drawn, first_chunk) -> bool
//                                   false: this CTA leaves tiles to others and goes on to combine
//   stored(params, chunk)           one thread: half a tile of a chunk is in memory
//   combine<Element>(params, call, num_tile_rows)
//                                   all threads, after the CTA's last tile
//
// and with either of them
//
//   end(params, call)               one thread of each CTA, after combine, or when it has loaded all its tiles
#pragma once

#include "gemm/epilogue.cuh"
#include "gemm/smem.cuh"
#include "gemm/tile_queue.cuh"
#include "moe/plan.h"

namespace flux::moe {

constexpr int kGroupedThreads = 128 * (1 + gemm::kNumMathWarpgroups);
constexpr int kLoaderThreads = 64;
// 168 for each thread at launch: 128 * 88 + 256 * 208 are just as many.
constexpr int kGroupedProducerRegisters = 88;
constexpr int kGroupedMathRegisters = 208;
constexpr int kGroupedLaunchRegisters = 168;

enum class Activation { kNone, kSilu, kGelu, kSwiglu };

template <class Rows>
struct GroupedParams {
  CUtensorMap weight;  // [experts * n, k], boxes of half a tile's columns
  CUtensorMap x;       // [rows, k], where it is in order
  const int32_t* offsets;
  const TileEntry* tiles;
  const int32_t* num_tile_rows;
  int n;            // rows of an expert's weight
  int out_columns;  // n, or half of it
  int n_tiles;
  int tiles_per_chunk;  // columns of tiles that are computed before the next ones; n_tiles: all at once
  int k;
  Activation activation;
  void* out;  // [rows, out_columns]
  typename Rows::Params rows;
};

// What a loader must know of a tile: its number, where its columns of the weight begin, and its rows.
struct Job {
  int index, first_column, first_row, last_row;
};

// After the stages, slabs and barriers of the house: the next job.
constexpr int grouped_smem_bytes(const gemm::TileConfig& c) {
  return gemm::smem_bytes(c) + static_cast<int>(sizeof(Job));
}

FLUX_DEVICE float silu(float x) { return x / (1.0f + __expf(-x)); }
FLUX_DEVICE float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678f)); }

template <int kAccumulators>
FLUX_DEVICE void activate(Activation activation, float (&d)[kAccumulators]) {
  if (activation == Activation::kSwiglu) {
    // The tile's first half of columns is the gate, the second is what it gates.
#pragma unroll
    for (int i = 0; i < kAccumulators / 2; ++i) d[i] = silu(d[i]) * d[i + kAccumulators / 2];
  } else if (activation == Activation::kSilu) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) d[i] = silu(d[i]);
  } else if (activation == Activation::kGelu) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) d[i] = gelu(d[i]);
  }
}

// A warp: staged rows (gemm::stage_rows) of a slab to memory, those below `num_rows` and columns below
// `num_columns`.
template <int kColumns>
FLUX_DEVICE void store_staged_rows(uint32_t slab, char* dst, int64_t row_bytes, int num_rows,
                                   int num_columns) {
  constexpr int kPanelRowBytes = 128;
  constexpr int kVector = 8;
  const int lane = ptx::lane(), piece = lane % 8;
#pragma unroll
  for (int panel = 0; panel < kColumns / 64; ++panel) {
    const int column = panel * 64 + piece * kVector;
    const uint32_t src = slab + panel * 64 * kPanelRowBytes;
#pragma unroll 4
    for (int row = lane / 8; row < 64; row += 4) {
      const float4 v = ptx::load_shared_v4(src + row * kPanelRowBytes + (piece ^ row % 8) * 16);
      if (row < num_rows && column < num_columns) {
        *reinterpret_cast<float4*>(dst + row * row_bytes + column * gemm::kElementBytes) = v;
      }
    }
  }
}

struct ChunkTile {
  int chunk;
  Tile tile;
};

// Tile number `index` of all chunks.
template <class Params>
FLUX_DEVICE ChunkTile chunk_tile_at(const Params& p, int num_tile_rows, int index) {
  const ColumnChunks chunks = {p.n_tiles, p.tiles_per_chunk};
  const int chunk = index / (num_tile_rows * p.tiles_per_chunk);
  Tile tile = tile_at(p.tiles, chunks.size(chunk), index - chunk * num_tile_rows * p.tiles_per_chunk);
  tile.n += chunks.first(chunk);
  return {chunk, tile};
}

template <class Element, int kConfig, class Rows>
__global__ void __launch_bounds__(kGroupedThreads, 1)
    sm90_grouped_gemm(const __grid_constant__ GroupedParams<Rows> params) {
  using gemm::kBlockK;
  using gemm::kBlockM;
  constexpr gemm::TileConfig kTile = gemm::kTileConfigs[kConfig];
  constexpr int kBlockN = kTile.block_n;
  constexpr int kSlabChunks = kTile.slab_n / gemm::kChunkN;
  static_assert(gemm::panel_n(kTile) == 64 && grouped_smem_bytes(kTile) <= gemm::kSmemLimit);
  using Shared = gemm::Smem<kConfig>;

  extern __shared__ uint8_t raw_smem[];
  const Shared smem(raw_smem);
  const int warp = threadIdx.x / 32;
  if constexpr (Rows::kArrive) {
    if (blockIdx.x < Rows::num_pushers(params.rows)) Rows::push(params.rows, Rows::begin(params.rows));
  }
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&params.weight);
    smem.init(/*cluster_size=*/1, /*sharers=*/1, Rows::kInOrder ? 1 : kLoaderThreads + 1);
  }
  __syncthreads();

  const int k_blocks = (params.k + kBlockK - 1) / kBlockK;
  const int num_tile_rows = *params.num_tile_rows, num_tiles = num_tile_rows * params.n_tiles;
  // Columns of the result that a tile has.
  const int tile_columns = params.activation == Activation::kSwiglu ? kBlockN / 2 : kBlockN;

  if (warp < 4) {
    ptx::setmaxnreg_dec<kGroupedProducerRegisters>();
    if (warp < 2) {
      const int thread = threadIdx.x;
      const auto call = Rows::begin(params.rows);
      uint32_t* const counter = Rows::tile_counter(params.rows);
      gemm::TileQueueWriter<Shared> queue;
      // One thread draws for all roles.
      const auto draw = [&](int otherwise) {
        int index = otherwise;
        if constexpr (Rows::kCombine) {
          const int first_chunk = num_tile_rows * params.tiles_per_chunk;
          if (!Rows::may_draw(params.rows, static_cast<int>(ptx::load_relaxed(counter)), first_chunk)) {
            queue.put(smem, /*cluster_size=*/1, num_tiles);
            return num_tiles;
          }
        }
        if (counter != nullptr) index = static_cast<int>(atomicAdd(counter, 1u));
        queue.put(smem, /*cluster_size=*/1, index);
        return index;
      };
      const auto take = [&](int otherwise) -> Job {
        const int index = draw(otherwise);
        if (index >= num_tiles) return {index, 0, 0, 0};
        const Tile tile = chunk_tile_at(params, num_tile_rows, index).tile;
        const int first_row = params.offsets[tile.expert] + tile.m * kBlockM;
        const int rows_end = min(first_row + kBlockM, params.offsets[tile.expert + 1]);
        return {index, tile.expert * params.n + tile.n * tile_columns, first_row, rows_end - 1};
      };
      // The next job takes four trips to memory: it is looked up while stages of this one are still full.
      const int take_at = max(0, k_blocks - kTile.stages);
      typename Shared::Stages ring;
      // One thread: the part of a stage that comes by TMA, as many bytes.
      const auto load = [&](const Job& job, int kb, uint32_t bytes) {
        const uint32_t full = smem.full(ring.index), b = smem.b(ring.index);
        const int second_column =
            params.activation == Activation::kSwiglu ? params.n / 2 : kBlockN / 2;  // after the first
        ptx::mbarrier_arrive_expect_tx(full, bytes);
        if constexpr (Rows::kInOrder) {
          ptx::tma_load_2d(&params.x, smem.a(ring.index), full, kb * kBlockK, job.first_row);
        }
        ptx::tma_load_2d(&params.weight, b, full, kb * kBlockK, job.first_column);
        ptx::tma_load_2d(&params.weight, b + kBlockN / 2 * 128, full, kb * kBlockK,
                         job.first_column + second_column);
      };
      constexpr uint32_t kBBytes = kBlockN * kBlockK * gemm::kElementBytes;

      if constexpr (Rows::kInOrder) {
        // Rows after the expert's last one are loaded too, and dropped in the end.
        if (thread == 0) {
          Job next = take(blockIdx.x);
          for (Job job = next; job.index < num_tiles; job = next) {
            for (int kb = 0; kb < k_blocks; ++kb, ring.advance()) {
              if (kb == take_at) next = take(job.index + gridDim.x);
              ptx::mbarrier_wait(smem.empty(ring.index), ring.phase ^ 1);
              load(job, kb, Shared::kABytes + kBBytes);
            }
          }
        }
      } else {
        // Eight threads for the 128 bytes of a row and a k-block; eight rows at a time.
        const int piece = thread % 8, row_in_eight = thread / 8;
        const uint32_t dst_in_eight = row_in_eight * 128 + (piece ^ row_in_eight) * 16;
        const int row_bytes = params.k * gemm::kElementBytes;
        typename Rows::Progress progress;
        const auto tell = [&](const Job& job) {
          const int words[] = {job.index, job.first_column, job.first_row, job.last_row};
#pragma unroll
          for (int i = 0; i < 4; ++i) ptx::store_shared(smem.end() + 4 * i, words[i]);
        };
        const auto told = [&](int i) { return static_cast<int>(ptx::load_shared(smem.end() + 4 * i)); };
        if (thread == 0) tell(take(blockIdx.x));
        while (true) {
          ptx::named_barrier_sync(1, kLoaderThreads);  // the next job is known
          const Job job = {told(0), told(1), told(2), told(3)};
          if (job.index >= num_tiles) break;
          // A row that is not there is loaded as the last one that is, and dropped in the end.
          const char* rows[kBlockM / 8];
#pragma unroll
          for (int i = 0; i < kBlockM / 8; ++i) {
            const int row = min(job.first_row + i * 8 + row_in_eight, job.last_row);
            rows[i] = Rows::at(params.rows, call, row) + piece * 16;
          }
          if constexpr (Rows::kArrive) {
            if (!Rows::admit(params.rows, call, progress, job.last_row, thread, kLoaderThreads)) {
              smem.set_failed();
            }
          }
          // All have read the job, and its rows are there.
          ptx::named_barrier_sync(1, kLoaderThreads);
          for (int kb = 0; kb < k_blocks; ++kb, ring.advance()) {
            if (thread == 0 && kb == take_at) tell(take(job.index + gridDim.x));
            ptx::mbarrier_wait(smem.empty(ring.index), ring.phase ^ 1);
            if (thread == 0) load(job, kb, kBBytes);
            const bool valid = kb * 128 + piece * 16 < row_bytes;
            const uint32_t a = smem.a(ring.index) + dst_in_eight;
#pragma unroll
            for (int i = 0; i < kBlockM / 8; ++i) {
              ptx::copy_async_16(a + i * 1024, rows[i] + (valid ? kb * 128 : 0), valid);
            }
            ptx::mbarrier_arrive_after_copies(smem.full(ring.index));
          }
        }
        if constexpr (Rows::kArrive) {
          if (thread == 0) Rows::end(params.rows, call);  // while the last tiles are computed
        }
      }
    } else {
      const int warpgroup = warp - 2;
      typename Shared::Slabs slabs;
      gemm::TileQueueReader<Shared> queue;
      const bool arrives = ptx::lane() == 0;
      for (int index = queue.next(smem, arrives); index < num_tiles; index = queue.next(smem, arrives)) {
        const auto [chunk, tile] = chunk_tile_at(params, num_tile_rows, index);
        const int first = params.offsets[tile.expert] + tile.m * kBlockM + warpgroup * 64;
        const int num_rows = params.offsets[tile.expert + 1] - first;
        for (int column = 0; column < tile_columns; column += kTile.slab_n, slabs.advance()) {
          const int out_column = tile.n * tile_columns + column;
          const int num_columns = min(tile_columns - column, params.out_columns - out_column);
          const int64_t row_bytes = static_cast<int64_t>(params.out_columns) * gemm::kElementBytes;
          char* dst = static_cast<char*>(params.out) + first * row_bytes + out_column * gemm::kElementBytes;
          ptx::mbarrier_wait(smem.slab_full(warpgroup, slabs.index), slabs.phase);
          store_staged_rows<kTile.slab_n>(smem.slab(warpgroup, slabs.index), dst, row_bytes, num_rows,
                                          num_columns);
          __syncwarp();
          if (ptx::lane() == 0) ptx::mbarrier_arrive(smem.slab_empty(warpgroup, slabs.index));
        }
        if constexpr (Rows::kCombine) {
          if (ptx::lane() == 0) Rows::stored(params.rows, chunk);
        }
      }
    }
  } else {
    ptx::setmaxnreg_inc<kGroupedMathRegisters>();
    using Mma = gemm::Wgmma<Element, kBlockN, gemm::Major::K, gemm::Major::K>;
    const int warpgroup = warp / 4 - 1;
    const int thread = threadIdx.x % 128;
    float d[Mma::kAccumulators];
    typename Shared::Stages ring;
    typename Shared::Slabs slabs;
    gemm::TileQueueReader<Shared> queue;
    const bool arrives = ptx::lane() == 0;
    for (int index = queue.next(smem, arrives); index < num_tiles; index = queue.next(smem, arrives)) {
      int held = 0;  // the stage whose wgmmas may still be running
#pragma unroll 1
      for (int kb = 0; kb < k_blocks; ++kb, ring.advance()) {
        // Gathered rows come by cp.async, whose bytes are in shared memory when the barrier counts them: wgmma
        // needs no fence here. One for the async proxy would wait for the wgmmas that still run: 411 TFLOP/s, not 650.
        ptx::mbarrier_wait(smem.full(ring.index), ring.phase);
        const uint64_t a = gemm::make_descriptor(smem.a(ring.index) + warpgroup * 64 * 128, 0, 1024);
        const uint64_t b = gemm::make_descriptor(smem.b(ring.index), 0, 1024);
        cute::warpgroup_arrive();
#pragma unroll
        for (int k = 0; k < kBlockK / 16; ++k) {
          Mma::step(a + k * (32 >> 4), b + k * (32 >> 4), d, kb > 0 || k > 0);
        }
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<1>();  // all but this k-block are done: the one before is free
        if (kb > 0 && ptx::lane() == 0) ptx::mbarrier_arrive(smem.empty(held));
        held = ring.index;
      }
      cute::warpgroup_wait<0>();
#pragma unroll
      for (int i = 0; i < Mma::kAccumulators; ++i) cute::warpgroup_fence_operand(d[i]);
      if (ptx::lane() == 0) ptx::mbarrier_arrive(smem.empty(held));

      activate(params.activation, d);
      if constexpr (Rows::kArrive) {
        // The host will raise; until then nobody shall mistake what was computed for a result.
        if (ptx::load_shared(smem.failed(warpgroup)) != 0) {
#pragma unroll
          for (int i = 0; i < Mma::kAccumulators; ++i) d[i] = __int_as_float(0x7FFFFFFF);
        }
      }
#pragma unroll
      for (int first_chunk = 0; first_chunk < kBlockN / gemm::kChunkN; first_chunk += kSlabChunks) {
        if (first_chunk * gemm::kChunkN >= tile_columns) break;
        const uint32_t slab = smem.slab(warpgroup, slabs.index);
        ptx::mbarrier_wait(smem.slab_empty(warpgroup, slabs.index), slabs.phase ^ 1);
#pragma unroll
        for (int chunk = 0; chunk < kSlabChunks; ++chunk) {
          gemm::stage_rows<64>(slab, chunk, thread,
                               gemm::pack<Element>(&d[(first_chunk + chunk) * gemm::kChunkAccumulators]));
        }
        ptx::mbarrier_arrive(smem.slab_full(warpgroup, slabs.index));
        slabs.advance();
      }
    }
  }
  if constexpr (Rows::kCombine) {
    __syncthreads();
    // All warps do the same from here on: registers are dealt out evenly again.
    if (warp < 4) {
      ptx::setmaxnreg_inc<kGroupedLaunchRegisters>();
    } else {
      ptx::setmaxnreg_dec<kGroupedLaunchRegisters>();
    }
    const auto call = Rows::begin(params.rows);
    Rows::template combine<Element>(params.rows, call, num_tile_rows);
    __syncthreads();
    if (threadIdx.x == 0) Rows::end(params.rows, call);
  }
}

}  // namespace flux::moe
