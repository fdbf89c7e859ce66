// Grouped GEMM: rows sorted by expert, each multiplied by the weight of its expert. Has the mainloop, stages and slabs
// of gemm/sm90/gemm.cuh. In addition, rows of x may be gathered from any location, and the rows of an expert may end
// in the middle of a tile.
//
//   loader     warp 0                 B by TMA, one thread; A too, unless its rows must be gathered
//   scheduler  warp 1                 looks up the next tile (job_queue.cuh)
//   storers    warps 2 and 3          one for each math warpgroup: stores its slabs to the rows that exist; or
//   gatherers  warps 2 and 3          if rows of x must be gathered: cp.async of 64 rows of A each, 16 bytes a thread
//   math       warpgroups 1 and 2     wgmma, then the activation; without storers, also the stores to memory
//
// A Rows policy defines where rows come from:
//
//   struct Params, Call             plain data; state that each thread reads once a launch
//   begin(params) -> Call
//   kInOrder                        the sorted rows are the rows of x
//   kArrive                         some rows come from peers
//   kCombine                        results are summed and sent as soon as a chunk of columns is complete
//   tile_counter(params)            counter from which CTAs draw their next tile, zero at launch; null: fixed stride
//
// if not kInOrder:
//   sources(params, call)           two matrices
//   place(params, row)              where sorted row `row` is: i for row i of the first, ~i for row i of the second
//   first_row_bytes(params)         fp8: from one row of the first matrix to the next
//   scales(params, call, place)     fp8: of a row
// if kArrive:
//   num_pushers(params)             number of CTAs that send before they compute
//   push(params, call, memory)      called by all threads of such a CTA; `memory`: shared memory not yet in use
//   struct Progress                 state of each thread of the scheduler
//   admit(params, call, progress, expert, row) -> bool
//                                   called by a warp: waits for all rows of an expert up to this one
// if kCombine:
//   may_draw(params, tiles_drawn, first_chunk)
//                                   false: this CTA computes no further tiles and goes on to combine
//   stored(params, chunk)           called by one thread: half a tile of a chunk is in memory
//   combine<Element>(params, call, num_tile_rows, memory)
//                                   called by all threads after the CTA's last tile; `memory`: free shared memory
// if kArrive or kCombine:
//   end(params, call)               called by one thread of each CTA, after combine, or after its last tile is drawn
#pragma once

#include "gemm/sm90/mainloop.cuh"
#include "moe/activation.cuh"
#include "moe/job_queue.cuh"
#include "moe/plan.h"

namespace flux::moe {

// --- scales of fp8 operands ---
//
// Those of rows of x arrive with each stage: rows of an expert begin anywhere. One scale for all rows, and scales of the
// weight that do not depend on K, are applied to the sums.

struct GroupedScales {
  // Of each expert (step 0), or of each row of its weight (step 1); or of blocks: [experts][n / kScaleBlock][k_block].
  const float* weight;
  int weight_step;
  int weight_rows;  // of all experts
  bool blocks;
  bool e5m2;             // the type of x
  const float* x;        // the scale of all rows, or null: each row has its own
  CUtensorMap x_scales;  // if rows are in order: of rows, or [k / kScaleBlock] of them
};

// A tile's columns in the weight: the first half begins at `row` of an expert's weight, the second half `second` rows later.
struct WeightRows {
  int expert, row, second;
};

template <int kBlockN, class Smem>
using GroupedPromotion = gemm::TilePromotion<kBlockN, 2, Smem>;

// n, k_blocks: of an expert's weight. first_row: of the warpgroup, in the staged scales.
template <int kBlockN, class Smem>
FLUX_DEVICE GroupedPromotion<kBlockN, Smem> grouped_promotion(const GroupedScales& s, const WeightRows& at,
                                                              int n, int k_blocks, int first_row,
                                                              const Smem& smem, float (&sums)[kBlockN / 2]) {
  using gemm::kScaleBlock;
  const int first = at.row / kScaleBlock, second = min(at.row + at.second, n - 1) / kScaleBlock;
  const int blocks = gemm::ceil_div(n, kScaleBlock);
  const float* const weight = s.weight + (static_cast<int64_t>(at.expert) * blocks + first) * k_blocks;
  return {sums,
          smem,
          /*has_rows=*/s.x == nullptr,
          first_row + gemm::first_row_of_thread(),
          {s.blocks ? weight : nullptr, k_blocks - 1},
          {s.blocks ? weight + (second - first) * k_blocks : nullptr, k_blocks - 1},
          /*boundary=*/1,
          /*pairs=*/!s.blocks};
}

template <int kAccumulators>
FLUX_DEVICE void scale_grouped_sums(const GroupedScales& s, const WeightRows& at, int n,
                                    float (&d)[kAccumulators]) {
  const float of_rows = s.x == nullptr ? 1.0f : __ldg(s.x);
  if (s.blocks) return;
  const int first = at.expert * n + at.row + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int i = 0; i < kAccumulators; i += 4) {
    const int in_half = i < kAccumulators / 2 ? i * 2 : i * 2 - kAccumulators + at.second;
    const int row = min(first + in_half, s.weight_rows - 2);  // those beyond the edge are not stored
    const float left = of_rows * __ldg(s.weight + (s.weight_step > 0 ? row : at.expert));
    const float right = of_rows * __ldg(s.weight + (s.weight_step > 0 ? row + 1 : at.expert));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      d[i + half * 2] *= left;
      d[i + half * 2 + 1] *= right;
    }
  }
}

// --- the kernel ---

// The launch has 168 registers a thread; 128 * 104 + 256 * 200 and 128 * 88 + 256 * 208 are the same total.
constexpr int grouped_producer_registers(const gemm::TileConfig& c) { return column_parts(c) > 1 ? 88 : 104; }
constexpr int grouped_math_registers(const gemm::TileConfig& c) { return column_parts(c) > 1 ? 208 : 200; }
constexpr int kGroupedLaunchRegisters = 168;

template <class Rows>
struct GroupedParams {
  CUtensorMap weight;  // [experts][n, k], boxes of half a tile's columns; MN-major: [experts][k, n], of 64
  CUtensorMap x;       // [rows, k], if kInOrder
  const int32_t* offsets;
  const TileEntry* tiles;
  const int32_t* num_tile_rows;
  int n;            // rows of an expert's weight
  int out_columns;  // n, or half of it
  int n_tiles;
  int tiles_per_chunk;  // columns of tiles in a chunk (ColumnChunks); n_tiles: a single chunk
  int k;
  Activation activation;
  void* out;  // [rows, out_columns]
  typename Rows::Params rows;
};

template <bool kFp8, class Rows>
using GroupedParamsFor =
    std::conditional_t<kFp8, gemm::WithScales<GroupedParams<Rows>, GroupedScales>, GroupedParams<Rows>>;

// The loader requests the next tile when this many k-blocks of the current tile remain to be loaded: about 4 us.
constexpr int kAskBefore = 16;

// The shared memory of the GEMM kernels, followed by the job queue.
constexpr int grouped_smem_bytes(const gemm::TileConfig& c) {
  return gemm::smem_bytes(c) + JobQueue::kBytes + 8;
}

template <int kAccumulators>
FLUX_DEVICE void activate(Activation activation, float (&d)[kAccumulators]) {
  if (activation == Activation::kSwiglu) {
    // The first half of the tile's columns is the gate, the second half is the gated input.
#pragma unroll
    for (int i = 0; i < kAccumulators / 2; ++i) d[i] = gemm::silu(d[i]) * d[i + kAccumulators / 2];
  } else if (activation == Activation::kSilu) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) d[i] = gemm::silu(d[i]);
  } else if (activation == Activation::kGelu) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) d[i] = gelu(d[i]);
  }
}

// Called by a warp: copies kRows staged rows (gemm::stage_rows) to global memory, but none beyond the edges. The first
// staged element has row `first_row` and column `column` in the tile.
template <int kColumns, int kRows, class Rows>
FLUX_DEVICE void store_staged_rows(const GroupedParams<Rows>& p, const Job& job, int tile_columns,
                                   uint32_t staged, int first_row, int column) {
  constexpr int kPanelRowBytes = 128;
  constexpr int kVector = 8;
  const int64_t row_bytes = static_cast<int64_t>(p.out_columns) * gemm::kResultBytes;
  const int out_column = job.first_column + column, num_rows = job.num_rows - first_row;
  const int num_columns = min(tile_columns - column, p.out_columns - out_column);
  char* const dst = static_cast<char*>(p.out) + (job.first_row + first_row) * row_bytes;
  const int lane = ptx::lane(), piece = lane % 8;
#pragma unroll
  for (int panel = 0; panel < kColumns / 64; ++panel) {
    const int in_slab = panel * 64 + piece * kVector;
    const uint32_t src = staged + panel * 64 * kPanelRowBytes;
#pragma unroll 4
    for (int row = lane / 8; row < kRows; row += 4) {
      const float4 v = ptx::load_shared_floats(src + row * kPanelRowBytes + (piece ^ row % 8) * 16);
      if (row < num_rows && in_slab < num_columns) {
        char* const to = dst + row * row_bytes + (out_column + in_slab) * gemm::kResultBytes;
        *reinterpret_cast<float4*>(to) = v;
      }
    }
  }
}

// The job for tile number `index`, counted over all chunks.
template <class Rows>
FLUX_DEVICE Job look_up(const GroupedParams<Rows>& p, int num_tile_rows, int tile_columns, int index) {
  const ColumnChunks chunks = {p.n_tiles, p.tiles_per_chunk};
  const int chunk = index / (num_tile_rows * p.tiles_per_chunk);
  const Tile tile = tile_at(p.tiles, chunks.size(chunk), index - chunk * num_tile_rows * p.tiles_per_chunk);
  const int column = (chunks.first(chunk) + tile.n) * tile_columns;
  const int first_row = p.offsets[tile.expert] + tile.m * gemm::kBlockM;
  const int num_rows = min(gemm::kBlockM, p.offsets[tile.expert + 1] - first_row);
  return {num_rows, first_row, column, tile.expert, chunk};
}

// second_half: from the first column of the weight that a tile needs to that of the second half of its columns.
template <gemm::Major kMajorB, int kBlockN>
FLUX_DEVICE void load_weight(const CUtensorMap* map, uint32_t b, uint32_t full, int k, const Job& job,
                             int second_half) {
  if constexpr (kMajorB == gemm::Major::K) {
    ptx::tma_load_3d(map, b, full, k, job.first_column, job.expert);
    ptx::tma_load_3d(map, b + kBlockN / 2 * 128, full, k, job.first_column + second_half, job.expert);
  } else {
#pragma unroll
    for (int panel = 0; panel < kBlockN / 64; ++panel) {
      ptx::tma_load_3d(map, b + panel * gemm::kPanelBytes, full, job.first_column + panel * 64, k,
                       job.expert);
    }
  }
}

template <class Element, gemm::Major kMajorB, int kConfig, class Rows>
__global__ void __launch_bounds__(gemm::kNumThreads, 1) sm90_grouped_gemm(
    const __grid_constant__ GroupedParamsFor<gemm::kTileConfigs[kConfig].is_fp8(), Rows> params) {
  using gemm::kBlockM;
  constexpr gemm::TileConfig kTile = gemm::kTileConfigs[kConfig];
  constexpr bool kFp8 = kTile.is_fp8();
  constexpr bool kReadsJobs = !Rows::kInOrder || kFp8;  // math warps need to know which tile it is
  constexpr int kBlockN = kTile.block_n;
  constexpr int kSlabChunks = kTile.slab_n / gemm::kChunkN;
  static_assert(!kFp8 || (kTile.promotes() && kMajorB == gemm::Major::K));
  static_assert(Rows::kInOrder || !Rows::kCombine, "only storers count what is stored");
  static_assert(!Rows::kInOrder || !Rows::kArrive, "rows that arrive must be gathered");
  static_assert(gemm::panel_n(kTile) == 64 && grouped_smem_bytes(kTile) <= gemm::kSmemLimit);
  using Shared = gemm::Smem<kConfig>;

  extern __shared__ uint8_t raw_smem[];
  const Shared smem(raw_smem);
  const JobQueue queue = {(smem.end() + 7) & ~7u};
  const int warp = ptx::warp();
  [[maybe_unused]] const auto call = Rows::begin(params.rows);
  if constexpr (Rows::kArrive) {
    // The pusher uses memory that TMA never writes, so no fence is needed.
    uint8_t* const memory = raw_smem + (smem.slab(0, 0) - ptx::smem_addr(raw_smem));
    if (blockIdx.x < Rows::num_pushers(params.rows)) Rows::push(params.rows, call, memory);
  }
  if (threadIdx.x == 0) {
    constexpr int kGatherers = Rows::kInOrder ? 0 : 64;  // threads
    constexpr int kStorers = Rows::kInOrder ? 32 : 0, kMath = kReadsJobs ? 128 : 4;
    ptx::prefetch_tensor_map(&params.weight);
    smem.init(/*cluster_size=*/1, /*sharers=*/1, /*loaders=*/1 + kGatherers);
    queue.init(/*readers=*/1 + kGatherers + gemm::kNumMathWarpgroups * (kStorers + kMath));
  }
  // After this barrier all threads have read the epoch.
  __syncthreads();

  const int k_blocks = ceil_div(params.k, kTile.block_k());
  const int num_tile_rows = *params.num_tile_rows;
  const int second_half = params.activation == Activation::kSwiglu ? params.n / 2 : kBlockN / 2;
  const int tile_columns = params.activation == Activation::kSwiglu ? kBlockN / 2 : kBlockN;

  if (warp < 4) {
    ptx::setmaxnreg_dec<grouped_producer_registers(kTile)>();
    if (warp == 0) {
      if (ptx::elect_one()) {
        const int ask_at = max(0, k_blocks - kTile.stages - kAskBefore);
        constexpr uint32_t kBBytes = kBlockN * gemm::kBlockBytes;
        typename Shared::Stages ring;
        JobReader jobs;
        for (Job job = jobs.read(queue); job.num_rows > 0; job = jobs.read(queue)) {
          jobs.give_back(queue);
#pragma unroll 1
          for (int kb = 0; kb < k_blocks; ++kb, ring.advance()) {
            if (kb == ask_at) ptx::mbarrier_arrive(queue.wanted());
            ptx::mbarrier_wait(smem.empty(ring.index), ring.phase ^ 1);
            const uint32_t full = smem.full(ring.index), b = smem.b(ring.index);
            uint32_t bytes = Rows::kInOrder ? Shared::kABytes + kBBytes : kBBytes;
            if constexpr (Rows::kInOrder && kFp8) {
              if (params.scales.x == nullptr) bytes += Shared::kScaleBoxBytes;
            }
            ptx::mbarrier_arrive_expect_tx(full, bytes);
            if constexpr (Rows::kInOrder && kFp8) {
              if (params.scales.x == nullptr) {
                ptx::tma_load_2d(&params.scales.x_scales, smem.scales(ring.index), full,
                                 job.first_row - job.first_row % gemm::kScaleAlignment,
                                 params.scales.blocks ? kb : 0);
              }
            }
            if constexpr (Rows::kInOrder) {
              // Rows after the expert's last one are loaded too, and dropped at the end.
              ptx::tma_load_2d(&params.x, smem.a(ring.index), full, kb * kTile.block_k(), job.first_row);
            }
            load_weight<kMajorB, kBlockN>(&params.weight, b, full, kb * kTile.block_k(), job, second_half);
          }
        }
      }
    } else if (warp == 1) {
      const int lane = ptx::lane(), num_tiles = num_tile_rows * params.n_tiles;
      uint32_t* const counter = Rows::tile_counter(params.rows);
      // Called by one lane: draws the index of the next tile.
      const auto draw = [&](int otherwise) {
        if constexpr (Rows::kCombine) {
          const int first_chunk = num_tile_rows * params.tiles_per_chunk;
          const int drawn = static_cast<int>(ptx::load_relaxed(counter));
          if (!Rows::may_draw(params.rows, drawn, first_chunk)) return num_tiles;
        }
        return counter != nullptr ? static_cast<int>(atomicAdd(counter, 1u)) : otherwise;
      };
      JobWriter jobs;
      [[maybe_unused]] typename Rows::Progress progress;
      for (int number = blockIdx.x;; number += gridDim.x) {
        const int index = __shfl_sync(~0u, lane == 0 ? draw(number) : 0, 0);
        Job job = {};
        if (index < num_tiles) job = look_up(params, num_tile_rows, tile_columns, index);
        jobs.wait_for_room(queue);
        if constexpr (!Rows::kInOrder) {
          // Rows after the last one get its location, so that every location is valid.
          const int last_row = job.first_row + job.num_rows - 1;
#pragma unroll
          for (int row = 0; row < kBlockM; row += 32) {
            if (job.num_rows == 0) break;
            const int place = Rows::place(params.rows, min(job.first_row + row + lane, last_row));
            ptx::store_shared(queue.place(jobs.cursor.index, row + lane), place);
          }
          if constexpr (Rows::kArrive) {
            if (job.num_rows > 0 && !Rows::admit(params.rows, call, progress, job.expert, last_row))
              smem.set_failed();
          }
        }
        jobs.put(queue, job);
        if (job.num_rows == 0) break;
        jobs.wait_until_wanted(queue);
      }
      if constexpr (Rows::kArrive) {
        if (lane == 0) Rows::end(params.rows, call);  // while the last tiles are computed
      }
    } else if constexpr (!Rows::kInOrder) {
      // Eight threads load the 128 bytes of a row in a k-block; a warp loads four rows at a time. Rows that do not
      // exist keep their old content, and their results are dropped (docs/design/moe.md#the-grouped-gemm).
      constexpr int kEach = kBlockM / 2 / 4;
      const int piece = ptx::lane() % 8, row_in_four = ptx::lane() / 8;
      const int first_row = (warp - 2) * (kBlockM / 2) + row_in_four;
      const int row_bytes = params.k * kTile.operand_bytes();
      int first_row_bytes = row_bytes;
      if constexpr (kFp8) first_row_bytes = Rows::first_row_bytes(params.rows);
      const Sources sources = Rows::sources(params.rows, call);
      const char* const first = sources.first + piece * 16;
      const char* const second = sources.second + piece * 16;
      typename Shared::Stages ring;
      JobReader jobs;
      for (Job job = jobs.read(queue); job.num_rows > 0; job = jobs.read(queue)) {
        const char* rows[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          const int place = jobs.place(queue, first_row + i * 4);
          rows[i] = (place >= 0 ? first + static_cast<int64_t>(place) * first_row_bytes
                                : second + static_cast<int64_t>(~place) * row_bytes);
        }
        // A lane also loads the scales of two rows, of which all exist (see the scheduler).
        [[maybe_unused]] RowScales scales[2];
        const int scaled_row = (warp - 2) * (kBlockM / 2) + ptx::lane();
        if constexpr (kFp8) {
#pragma unroll
          for (int i = 0; i < 2; ++i)
            scales[i] = Rows::scales(params.rows, call, jobs.place(queue, scaled_row + i * 32));
        }
        jobs.give_back(queue);
        for (int kb = 0; kb < k_blocks; ++kb, ring.advance()) {
          ptx::mbarrier_wait(smem.empty(ring.index), ring.phase ^ 1);
          const bool valid = kb * 128 + piece * 16 < row_bytes;
          const int offset = valid ? kb * 128 : 0;
          const uint32_t a = smem.a(ring.index) + first_row * 128;
#pragma unroll
          for (int i = 0; i < kEach; ++i) {
            // The index of the row within eight determines its swizzle.
            const uint32_t dst = a + i * 512 + (piece ^ (i % 2 * 4 + row_in_four)) * 16;
            if (first_row + i * 4 < job.num_rows) ptx::copy_async_16(dst, rows[i] + offset, valid);
          }
          if constexpr (kFp8) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              ptx::copy_async_4(smem.scales(ring.index) + (scaled_row + i * 32) * 4,
                                scales[i].first + kb * scales[i].step);
            }
          }
          ptx::mbarrier_arrive_after_copies(smem.full(ring.index));
        }
      }
    } else {
      const int warpgroup = warp - 2;
      typename Shared::Slabs slabs;
      JobReader jobs;
      for (Job job = jobs.read(queue); job.num_rows > 0; job = jobs.read(queue)) {
        jobs.give_back(queue);
        for (int column = 0; column < tile_columns; column += kTile.slab_n, slabs.advance()) {
          ptx::mbarrier_wait(smem.slab_full(warpgroup, slabs.index), slabs.phase);
          store_staged_rows<kTile.slab_n, 64>(params, job, tile_columns, smem.slab(warpgroup, slabs.index),
                                              warpgroup * 64, column);
          __syncwarp();
          if (ptx::lane() == 0) ptx::mbarrier_arrive(smem.slab_empty(warpgroup, slabs.index));
        }
        if constexpr (Rows::kCombine) {
          if (ptx::lane() == 0) Rows::stored(params.rows, job.chunk);
        }
      }
    }
  } else {
    ptx::setmaxnreg_inc<grouped_math_registers(kTile)>();
    constexpr int kAccumulators = kBlockN / 2;
    const int warpgroup = warp / 4 - 1;
    const int thread = threadIdx.x % 128;
    float d[kAccumulators];
    typename Shared::Stages ring;
    typename Shared::Slabs slabs;
    JobReader jobs;
    const auto full = [&](int stage) { return smem.full(stage); };
    // Gathered rows come by cp.async, whose bytes are in shared memory when the barrier counts them, so wgmma needs
    // no fence. A fence for the async proxy would wait for the running wgmmas (docs/design/moe.md#the-grouped-gemm).
    const auto operands = [&](int stage, int) {
      return gemm::Operands{gemm::make_descriptor(smem.a(stage) + warpgroup * 64 * 128, 0, 1024),
                            gemm::make_b_descriptor<kMajorB>(smem.b(stage))};
    };
    const auto release = [&](int stage) {
      if (ptx::lane() == 0) ptx::mbarrier_arrive(smem.empty(stage));
    };
    for (;;) {
      Job job = {};
      if constexpr (!kReadsJobs) {
        job.num_rows = jobs.rows(queue);
      } else {
        job = jobs.read(queue);
        jobs.give_back(queue);
      }
      if (job.num_rows == 0) break;
      const int blocks = job.num_rows > warpgroup * 64 ? k_blocks : 0;
      gemm::pass_over(ring, k_blocks - blocks, full, release);
      if constexpr (!kFp8) {
        using Mma = gemm::Wgmma<Element, kBlockN, gemm::Major::K, kMajorB>;
        gemm::multiply<Mma, 32, gemm::kBStepBytes<kMajorB>, 1, /*kReleasesEarly=*/true>(ring, blocks, d, full,
                                                                                        operands, release);
      } else {
        constexpr int kPartN = kBlockN / gemm::column_parts(kTile);
        float products[kPartN / 2];
#pragma unroll
        for (int i = 0; i < kAccumulators; ++i) d[i] = 0.0f;
        const WeightRows at = {job.expert, job.first_column, second_half};
        const int before = Rows::kInOrder ? job.first_row % gemm::kScaleAlignment : 0;
        const auto promotion = grouped_promotion<kBlockN>(params.scales, at, params.n, k_blocks,
                                                          before + warpgroup * 64, smem, d);
        gemm::multiply_fp8<gemm::E4M3xE4M3, gemm::E5M2xE4M3, kPartN>(
            params.scales.e5m2, ring, blocks, products, full, operands, release, promotion);
        scale_grouped_sums(params.scales, at, params.n, d);
      }
      activate(params.activation, d);
      if constexpr (Rows::kArrive) {
        if (ptx::load_shared(smem.failed(warpgroup)) != 0) {  // a wait timed out: NaN until the host raises
#pragma unroll
          for (int i = 0; i < kAccumulators; ++i) d[i] = __int_as_float(0x7FFFFFFF);
        }
      }
#pragma unroll
      for (int first_chunk = 0; first_chunk < kBlockN / gemm::kChunkN; first_chunk += kSlabChunks) {
        if (first_chunk * gemm::kChunkN >= tile_columns) break;
        const uint32_t slab = smem.slab(warpgroup, slabs.index);
        if constexpr (Rows::kInOrder) {
          ptx::mbarrier_wait(smem.slab_empty(warpgroup, slabs.index), slabs.phase ^ 1);
        }
#pragma unroll
        for (int chunk = 0; chunk < kSlabChunks; ++chunk) {
          gemm::stage_rows<64>(slab, chunk, thread,
                               gemm::round<Element>(&d[(first_chunk + chunk) * gemm::kChunkAccumulators]));
        }
        if constexpr (Rows::kInOrder) {
          ptx::mbarrier_arrive(smem.slab_full(warpgroup, slabs.index));
        } else {
          // Each warp owns 16 rows of a slab. All lanes have also read the previous slab at this point.
          static_assert(kTile.slabs > 1);
          __syncwarp();
          const int row = warp % 4 * 16;
          store_staged_rows<kTile.slab_n, 16>(params, job, tile_columns, slab + row * 128,
                                              warpgroup * 64 + row, first_chunk * gemm::kChunkN);
        }
        slabs.advance();
      }
    }
  }
  if constexpr (Rows::kCombine) {
    __syncthreads();
    // All warps do the same work from here on, so registers are redistributed evenly.
    if (warp < 4) {
      ptx::setmaxnreg_inc<kGroupedLaunchRegisters>();
    } else {
      ptx::setmaxnreg_dec<kGroupedLaunchRegisters>();
    }
    static_assert(Rows::kCombineBytes <= kTile.stages * Shared::kStageBytes + gemm::staging_bytes(kTile));
    Rows::template combine<Element>(params.rows, call, num_tile_rows, raw_smem);
    __syncthreads();
    if (threadIdx.x == 0) Rows::end(params.rows, call);
  }
}

}  // namespace flux::moe
