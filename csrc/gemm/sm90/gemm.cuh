// The main GEMM kernel: D = A * B^T, persistent and warp-specialised for sm_90a. A Store policy (policy.h) defines
// where tiles go.
//
//   loader   warp 0, one thread     TMA loads of A and B into a ring of stages; a pair of CTAs shares A or B;
//                                   draws the next tile
//   math     warpgroups 1 and 2     wgmma on 64 rows each; then each stages its half tile, slab by slab
//   storers  warps 1 and 2, one     one for each math warpgroup: stores its slabs to D by TMA, or sends them as the
//            thread each            Store policy says, and loads the peers' contributions
//
// Separate storers hide the latency of remote stores (docs/design/gemm-rs.md#what-sending-costs-and-who-pays).
#pragma once

#include "gemm/sm90/mainloop.cuh"

namespace flux::gemm {

// --- the tile scheduler ---
//
// The loader of a cluster's first CTA draws the next index of the tile order shortly before it has loaded the last
// k-block of its tile, and passes it to every role of every CTA of the cluster through a short queue in shared memory.
//
// Tiles that leave over a link are drawn from a counter in global memory, as late as possible
// (docs/design/gemm-rs.md#the-kernel). A CTA whose local tile waits for peers draws nothing before they have arrived:
// an idle CTA could start it. A local tile is drawn only after every remote tile has been drawn by a resident cluster,
// so a CTA that is not resident yet (NCCL may occupy SMs) never holds a tile that others wait for.

// The state of a role (math warp, storer, loader) that reads the queue.
template <class Smem>
struct TileQueueReader {
  RingCursor<kTileQueue> cursor;

  FLUX_DEVICE int next(const Smem& smem) {
    ptx::mbarrier_wait(smem.tile_full(cursor.index), cursor.phase);
    const int index = static_cast<int>(ptx::load_shared(smem.tile_index(cursor.index)));
    ptx::mbarrier_arrive_cluster(smem.tile_empty(cursor.index), 0);
    cursor.advance();
    return index;
  }
  // Called by all lanes of a warp. Lane 0 reads the entry and releases it itself, so that racecheck sees the order.
  FLUX_DEVICE int next_for_warp(const Smem& smem) {
    ptx::mbarrier_wait(smem.tile_full(cursor.index), cursor.phase);
    const bool reads = ptx::lane() == 0;
    int index = reads ? static_cast<int>(ptx::load_shared(smem.tile_index(cursor.index))) : 0;
    index = __shfl_sync(~0u, index, 0);
    if (reads) ptx::mbarrier_arrive_cluster(smem.tile_empty(cursor.index), 0);
    cursor.advance();
    return index;
  }
};

// The state of the only writer of the queue: the loader of the cluster's first CTA.
template <class Smem>
struct TileQueueWriter {
  RingCursor<kTileQueue> cursor;

  FLUX_DEVICE void put(const Smem& smem, int cluster_size, int index) {
    ptx::mbarrier_wait(smem.tile_empty(cursor.index), cursor.phase ^ 1);
    if (cluster_size == 1) {
      ptx::store_shared(smem.tile_index(cursor.index), index);
      ptx::mbarrier_arrive(smem.tile_full(cursor.index));
    } else {
      for (int cta = 0; cta < cluster_size; ++cta) {
        ptx::mbarrier_arrive_expect_tx_cluster(smem.tile_full(cursor.index), sizeof(index), cta);
        ptx::store_async_cluster(smem.tile_index(cursor.index), index, smem.tile_full(cursor.index), cta);
      }
    }
    cursor.advance();
  }

  FLUX_DEVICE void drain(const Smem& smem) {
    for (int entry = 0; entry < kTileQueue; ++entry, cursor.advance())
      ptx::mbarrier_wait(smem.tile_empty(cursor.index), cursor.phase ^ 1);
  }
};

// --- split K ---
//
// The CTAs of a cluster share a tile, and each multiplies a part of K, for problems with fewer tiles than SMs
// and a long K. Each CTA then sums a share of the tile's columns, slab by slab, and stores it. A CTA writes its sums to
// the memory of the stages; one bulk copy for each other CTA and warpgroup delivers the part that it adds, and completes
// on its barrier. Cluster barriers that order memory would wait for everything in flight.

// The part of K that a CTA multiplies, and the chunks of the tile's columns that it sums and stores.
template <int kTileChunks, int kSlabChunks>
struct KPart {
  static constexpr int kChunks = kTileChunks;
  static constexpr int kSlabs = (kChunks + kSlabChunks - 1) / kSlabChunks;
  static constexpr int kMaxSlabs = (kSlabs + kMinKSplit - 1) / kMinKSplit;  // of a share
  static constexpr int kMaxChunks = kMaxSlabs * kSlabChunks;

  int first_block, num_blocks;
  int first_chunk, end_chunk;

  FLUX_DEVICE KPart(int part, int split, int k_blocks) {
    first_block = k_blocks * part / split;
    num_blocks = k_blocks * (part + 1) / split - first_block;
    first_chunk = kSlabs * part / split * kSlabChunks;
    end_chunk = min(kSlabs * (part + 1) / split * kSlabChunks, kChunks);
  }
};

// A chunk of a warpgroup's sums: halves of 16 bytes a thread.
constexpr int kPartBytes = 2 * 128 * 16;

// The exchange of partial sums, for the math threads of a CTA. The memory of the stages holds this CTA's sums, then the
// parts of its share that other CTAs have sent.
template <class Smem, class Part>
struct Meeting {
  static constexpr int kMaxOthers = kMaxKSplit - 1;
  static constexpr int kOwnBytes = kNumMathWarpgroups * Part::kChunks * kPartBytes;
  static constexpr int kShareBytes = Part::kMaxChunks * kPartBytes;  // of a warpgroup and a CTA, at most
  static_assert(kOwnBytes + kMaxOthers * kNumMathWarpgroups * kShareBytes <=
                Smem::kTile.stages * Smem::kStageBytes);

  const Smem& smem;
  const int cta, split, warpgroup, thread;  // of the warpgroup

  FLUX_DEVICE uint32_t own(int chunk) const {
    return smem.base + (warpgroup * Part::kChunks + chunk) * kPartBytes;
  }
  FLUX_DEVICE uint32_t received(int at, int source) const {
    const int slot = source < at ? source : source - 1;
    return smem.base + kOwnBytes + (slot * kNumMathWarpgroups + warpgroup) * kShareBytes;
  }

  // Called by all math threads after their last wgmma has read its operands: writes the sums and sends them.
  template <int kAccumulators>
  FLUX_DEVICE void send(const float (&d)[kAccumulators]) const {
    // Announces to all CTAs of the cluster that this warp has read its stages, so they may write there. The named
    // barrier makes both warpgroups of this CTA finish before the stores below.
    const int lane = static_cast<int>(ptx::lane());
    if (lane < split) ptx::mbarrier_arrive_cluster(smem.ring_free(), lane);
    ptx::named_barrier_sync(kMathBarrier, kNumMathWarpgroups * 128);
#pragma unroll
    for (int i = 0; i < 2 * Part::kChunks; ++i) {
      ptx::store_shared_v4(own(i / 2) + i % 2 * (kPartBytes / 2) + thread * 16, d[4 * i], d[4 * i + 1],
                           d[4 * i + 2], d[4 * i + 3]);
    }
    ptx::fence_proxy_async_smem();
    ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);
    if (thread < split) {
      // Also waits if nothing is sent, because all arrivals must have been received before a CTA exits.
      ptx::mbarrier_wait(smem.ring_free(), 0);
      const Part share(thread, split, 0);
      const uint32_t bytes = (share.end_chunk - share.first_chunk) * kPartBytes;
      if (thread == cta) {
        ptx::mbarrier_arrive_expect_tx(smem.parts_full(), (split - 1) * bytes);
      } else if (bytes > 0) {
        ptx::bulk_copy_cluster(received(thread, cta), own(share.first_chunk), bytes, smem.parts_full(),
                               thread);
      }
    }
    __syncwarp();  // reconverges the warp; a CTA without a share has no later synchronisation
  }

  // Called by all math threads: sums this CTA's share over all CTAs, in the order of their ranks in the cluster.
  template <int kSums>
  FLUX_DEVICE void sum(const Part& part, float (&sums)[kSums]) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
    ptx::mbarrier_wait(smem.parts_full(), 0);
#pragma unroll 1
    for (int source = 0; source < split; ++source) {
      const uint32_t from = (source == cta ? own(part.first_chunk) : received(cta, source)) + thread * 16;
#pragma unroll
      for (int i = 0; i < kSums / 4; ++i) {
        if (part.first_chunk + i / 2 >= part.end_chunk) break;
        const float4 v = ptx::load_shared_floats(from + i * (kPartBytes / 2));
        sums[4 * i] += v.x;
        sums[4 * i + 1] += v.y;
        sums[4 * i + 2] += v.z;
        sums[4 * i + 3] += v.w;
      }
    }
  }
};

// --- the kernel ---

// Of 65,536 registers a CTA uses 128 * 80 + 256 * 208 = 63,488. Storers of GEMM+ReduceScatter just fit into 72.
constexpr int kProducerRegisters = 80;
constexpr int kMathRegisters = 208;

template <class Store>
struct GemmParams {
  CUtensorMap a, b, d;
  CUtensorMap last_a, last_b;  // for the last tile of a shard's rows, and the last tile of columns
  TileOrder order;
  int rows_per_shard;
  int k_blocks;
  int last_rows, last_columns;  // Boxes::rows of last_a and last_b; 0: the last tile is full
  int n;
  const void* bias;  // [n] or null
  typename Store::Params store;
};

template <bool kFp8, class Store>
using GemmParamsFor = std::conditional_t<kFp8, WithScales<GemmParams<Store>>, GemmParams<Store>>;

// Element: the type of the result (or fp32, see ScaleParams), of the bias, of what travels, and of 16-bit operands.
template <class Element, Major kMajorB, int kConfig, class Store>
__global__ void __launch_bounds__(kNumThreads, 1)
    sm90_gemm(const __grid_constant__ GemmParamsFor<kTileConfigs[kConfig].is_fp8(), Store> params) {
  constexpr TileConfig kTile = kTileConfigs[kConfig];
  constexpr bool kFp8 = kTile.is_fp8(), kStoresFloats = kFp8 && !Store::kReduces;
  constexpr int kBlockN = kTile.block_n;
  constexpr int kSlabChunks = kTile.slab_n / kChunkN;
  constexpr int kChunks = kBlockN / kChunkN;
  using Shared = Smem<kConfig>;
  using Part = KPart<kChunks, kSlabChunks>;

  extern __shared__ uint8_t raw_smem[];
  const Shared smem(raw_smem);
  const TileOrder& order = params.order;
  const int cta = static_cast<int>(ptx::cluster_cta_rank());
  const int cluster_size = order.cluster_size();
  const int warp = ptx::warp();
  const int split = Store::kSplitsK ? cluster_size : 1;
  const int sharers = Store::kSplitsK ? 1 : cluster_size;  // CTAs that share loads
  const Part part(Store::kSplitsK ? cta : 0, split, params.k_blocks);

  if constexpr (Store::kGathers) {
    if (blockIdx.x < Store::num_pushers(params.store)) Store::push(params.store);
  }
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&params.a);
    ptx::prefetch_tensor_map(&params.b);
    ptx::prefetch_tensor_map(&params.d);
    if (params.last_rows > 0) ptx::prefetch_tensor_map(&params.last_a);
    if (params.last_columns > 0) ptx::prefetch_tensor_map(&params.last_b);
    if constexpr (kTile.promotes()) {
      if (params.scales.blocks) ptx::prefetch_tensor_map(&params.scales.x_blocks);
    }
    smem.init(cluster_size, sharers, /*loaders=*/1);
  }
  // Barriers must be initialised before a partner arrives on them.
  if (cluster_size > 1) ptx::cluster_sync_relaxed();
  ptx::wait_for_earlier_kernels();
  // All threads must have read the epoch before one of them closes the call.
  [[maybe_unused]] auto call = Store::begin(params.store);
  __syncthreads();

  if (warp < 4) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (ptx::elect_one()) {
      if (warp == 0) {
        const int step = gridDim.x / cluster_size, last = order.num_clusters();
        typename Shared::Stages ring;
        TileQueueReader<Shared> queue;
        TileQueueWriter<Shared> next_tile;
        uint32_t* const counter = Store::tile_counter(params.store);
        // The atomic that draws a tile takes as long as one or two k-blocks, so it overlaps with their loads.
        const int draw_at = part.num_blocks > 2 ? part.num_blocks - 2 : 0;
        uint32_t own_phase = 0;
        const auto draw = [&](int index) {
          return counter != nullptr ? static_cast<int>(atomicAdd(counter, 1u)) : index;
        };
        const auto pass_on = [&](int index) {
          if (cta != 0) return queue.next(smem);
          next_tile.put(smem, cluster_size, index);
          return index;
        };
        int next = cta == 0 ? draw(blockIdx.x / cluster_size) : 0;
        for (int index = pass_on(next); index < last; index = pass_on(next)) {
          const Tile tile = order.at(index, cta);
          const Source x = Store::source(params, call, tile);
          const int column = tile.n * kBlockN;
          if constexpr (Store::kGathers) {
            if (!Store::admit(params.store, call, tile)) smem.set_failed();
          }
          // Gathered shards are followed by further rows, so their last tile uses full boxes.
          const bool ends_x = tile.m == order.m_tiles - 1 && params.last_rows > 0 && x.map == &params.a;
          const bool ends_weight = tile.n == order.n_tiles - 1 && params.last_columns > 0;
          const int a_boxes = order.cluster_n(), b_boxes = kMajorB == Major::K ? order.cluster_m() : 1;
          const Boxes a = ends_x ? Boxes{&params.last_a, params.last_rows} : Boxes{x.map, kBlockM / a_boxes};
          const Boxes b =
              ends_weight ? Boxes{&params.last_b, params.last_columns} : Boxes{&params.b, kBlockN / b_boxes};
          int stage_bytes = (a.rows * a_boxes + b.rows * b_boxes) * kBlockBytes;
          [[maybe_unused]] BlockScaleSource scales = {};
          if constexpr (kTile.promotes()) {
            if (params.scales.blocks) {
              scales = Store::block_scales(params, call, tile, x);
              stage_bytes += Shared::kScaleBoxBytes;
              scales.row -= scales.row % kScaleAlignment;
            }
          }
          // A CTA whose tile still waits for peers must not draw a tile that a free CTA could take.
          const bool waits = Store::kReduces && Store::is_local(params.store, tile);
#pragma unroll 1
          for (int kb = 0; kb < part.num_blocks; ++kb, ring.advance()) {
            if (kb == draw_at && cta == 0 && !waits) next = draw(index + step);
            const int k = (part.first_block + kb) * kTile.block_k();
            const uint32_t full = smem.full(ring.index);
            ptx::mbarrier_wait(smem.empty(ring.index), ring.phase ^ 1);
            ptx::mbarrier_arrive_expect_tx(full, stage_bytes);
            load_a(a, smem.a(ring.index), full, k, x.row, cta, order.cluster == Cluster::kPairN);
            load_b<kMajorB, kBlockN>(b, smem.b(ring.index), full, k, column, cta,
                                     order.cluster == Cluster::kPairM);
            if constexpr (kTile.promotes()) {
              if (scales.map != nullptr) {
                ptx::tma_load_2d(scales.map, smem.scales(ring.index), full, scales.row,
                                 scales.first_block + part.first_block + kb);
              }
            }
          }
          if (waits && cta == 0) {
            ptx::mbarrier_wait(smem.arrived(), own_phase);
            own_phase ^= 1;
            next = draw(index + step);
          }
        }
        ptx::let_next_kernel_start();
        Store::end(params.store, call);
        if (cluster_size > 1) {
          // The partner's last arrivals would otherwise corrupt the mbarriers of the next launch.
          for (int stage = 0; stage < kTile.stages; ++stage, ring.advance())
            ptx::mbarrier_wait(smem.empty(ring.index), ring.phase ^ 1);
          if (cta == 0) next_tile.drain(smem);
        }
      } else if (warp <= kNumMathWarpgroups) {
        const int warpgroup = warp - 1;
        const int last = order.num_clusters();
        typename Shared::Pieces pieces;
        const int last_wave = order.num_remote_clusters() - static_cast<int>(gridDim.x) / cluster_size;
        SlabRing<Shared> slabs;
        TileQueueReader<Shared> queue;
        for (int index = queue.next(smem); index < last; index = queue.next(smem)) {
          const Tile tile = order.at(index, cta);
          if (!tile.valid) continue;
          if constexpr (kFp8) {
            if (params.scales.sums != nullptr) continue;  // math warps store fp32 results themselves
          }
          const bool local = Store::is_local(params.store, tile);
          if (local) Store::fetch(params.store, call, tile, warpgroup, smem, pieces);
          for (int chunk = part.first_chunk; chunk < part.end_chunk; chunk += kSlabChunks) {
            const int num_chunks = kChunks - chunk < kSlabChunks ? kChunks - chunk : kSlabChunks;
            const uint32_t slab = slabs.wait_full(smem, warpgroup);
            if (local) {
              store_panels<panel_n(kTile)>(&params.d, slab, tile.m * kBlockM + warpgroup * 64,
                                           tile.n * kBlockN + chunk * kChunkN, num_chunks * kChunkN,
                                           params.rows_per_shard, params.n, Store::kGathers ? tile.shard : 0);
            } else {
              Store::send(params.store, call, tile, index >= last_wave, warpgroup, chunk, num_chunks, slab);
            }
            slabs.commit(smem, warpgroup);
          }
          slabs.drain(smem, warpgroup);
          if (!local) {
            ptx::bulk_wait_complete();
            Store::publish(params.store, call, tile, warpgroup);
          }
        }
        ptx::bulk_wait_read<0>();  // the writes are complete when the launch ends
        if constexpr (Store::kGathers || Store::kReduces) Store::check_peers(params.store, call);
      }
    }
  } else {
    ptx::setmaxnreg_inc<kMathRegisters>();
    constexpr int kAccumulators = kBlockN / 2;
    const int warpgroup = warp / 4 - 1;
    const int thread = threadIdx.x % 128;
    const int last = order.num_clusters();
    float d[kAccumulators];
    typename Shared::Stages ring;
    typename Shared::Pieces pieces;
    typename Shared::Slabs slabs;

    TileQueueReader<Shared> queue;
    // A stage is released to every CTA whose loads fill it: this CTA, and the partner that multicasts.
    const bool releases = static_cast<int>(ptx::lane()) < sharers;
    const uint32_t filler = Store::kSplitsK ? cta : ptx::lane();
    const auto full = [&](int stage) { return smem.full(stage); };
    const auto operands = [&](int stage, int) {
      return Operands{make_descriptor(smem.a(stage) + warpgroup * 64 * 128, 0, 1024),
                      make_b_descriptor<kMajorB>(smem.b(stage))};
    };
    const auto release = [&](int stage) {
      if (releases) ptx::mbarrier_arrive_cluster(smem.empty(stage), filler);
    };
    for (int index = queue.next_for_warp(smem); index < last; index = queue.next_for_warp(smem)) {
      const Tile tile = order.at(index, cta);
      // A branch around the loop would have ptxas serialise the wgmmas.
      const bool has_rows = tile.m * kBlockM + warpgroup * 64 < params.rows_per_shard;
      const int blocks = has_rows ? part.num_blocks : 0;
      pass_over(ring, part.num_blocks - blocks, full, release);
      if constexpr (!kFp8) {
        using Mma = Wgmma<Element, kBlockN, Major::K, kMajorB>;
        multiply<Mma, 32, kBStepBytes<kMajorB>>(ring, blocks, d, full, operands, release);
      } else {
        const Source x = Store::source(params, call, tile);
        if constexpr (kTile.promotes()) {
          constexpr int kPartN = kBlockN / column_parts(kTile);
          float products[kPartN / 2];
#pragma unroll
          for (int i = 0; i < kAccumulators; ++i) d[i] = 0.0f;
          const ColumnScales<kBlockN> columns(params.scales, tile.n * kBlockN, params.n, params.k_blocks,
                                              part);
          const int before = Store::block_scales(params, call, tile, x).row % kScaleAlignment;
          const TilePromotion<kBlockN, kScaleParts<kBlockN>, Shared> promotion = {
              d,
              smem,
              params.scales.blocks,
              before + warpgroup * 64 + first_row_of_thread(),
              columns.before,
              columns.behind,
              columns.boundary,
              /*pairs=*/!params.scales.blocks};
          multiply_fp8<E4M3xE4M3, E5M2xE4M3, kPartN>(params.scales.e5m2, ring, blocks, products, full,
                                                     operands, release, promotion);
        } else {
          using Mma = Wgmma<E4M3xE4M3, kBlockN, Major::K, Major::K>;
          multiply<Mma, 32, 32>(ring, blocks, d, full, operands, release);
        }
        const float* const row_scales = Store::row_scales(params, call, tile, x);
        scale_sums(params.scales, row_scales + warpgroup * 64 * params.scales.x_step,
                   params.rows_per_shard - tile.m * kBlockM - warpgroup * 64, tile.n * kBlockN, params.n, d);
      }

      if (!tile.valid) continue;
      const bool local = Store::is_local(params.store, tile);
      if (local) {
        Store::template add_arrived<Element>(params.store, tile, warpgroup, smem, pieces, d);
        // With split K, only the first CTA adds the bias, so that it is added once.
        const bool adds_bias = params.bias != nullptr && (!Store::kSplitsK || cta == 0);
        if constexpr (kFp8) {
          if (adds_bias && params.scales.sums != nullptr) {
            add_bias<float>(params.bias, tile.n * kBlockN, params.n, d);
          } else if (adds_bias) {
            add_bias<Element>(params.bias, tile.n * kBlockN, params.n, d);
          }
        } else {
          if (adds_bias) add_bias<Element>(params.bias, tile.n * kBlockN, params.n, d);
        }
      }
      if constexpr (Store::kGathers || Store::kReduces) {
        if (ptx::load_shared(smem.failed(warpgroup)) != 0) {  // a wait timed out: NaN until the host raises
#pragma unroll
          for (int i = 0; i < kAccumulators; ++i) d[i] = __int_as_float(0x7FFFFFFF);
        }
      }
      // Of columns first_chunk to end_chunk - 1 of a tile with an fp32 result. Returns whether it is one.
      const auto store_directly = [&](const auto& sums, int first_chunk, int end_chunk) {
        if constexpr (kStoresFloats) {
          if (params.scales.sums == nullptr) return false;
          const int row = tile.m * kBlockM + warpgroup * 64, column = tile.n * kBlockN;
          store_sums(params.scales, (Store::kGathers ? tile.shard * params.rows_per_shard : 0) + row,
                     params.rows_per_shard - row, column + first_chunk * kChunkN,
                     min(column + end_chunk * kChunkN, params.n), sums);
          return true;
        }
        return false;
      };
      const auto stage_slab = [&](const float* sums, int num_chunks) {
        const uint32_t slab = smem.slab(warpgroup, slabs.index);
        ptx::mbarrier_wait(smem.slab_empty(warpgroup, slabs.index), slabs.phase ^ 1);
#pragma unroll
        for (int chunk = 0; chunk < kSlabChunks; ++chunk) {
          if (chunk >= num_chunks) break;
          const uint4 fragment = round<Element>(&sums[chunk * kChunkAccumulators]);
          if (local) {
            stage_rows<panel_n(kTile)>(slab, chunk, thread, fragment);
          } else {
            stage_fragments(slab, chunk, thread, fragment);
          }
        }
        ptx::fence_proxy_async_smem();
        ptx::mbarrier_arrive(smem.slab_full(warpgroup, slabs.index));
        slabs.advance();
      };
      if constexpr (Store::kSplitsK) {
        const Meeting<Shared, Part> meeting = {smem, cta, split, warpgroup, thread};
        meeting.send(d);
        float sums[Part::kMaxChunks * kChunkAccumulators];
        meeting.sum(part, sums);
        if (!store_directly(sums, part.first_chunk, part.end_chunk)) {
#pragma unroll
          for (int slab = 0; slab < Part::kMaxSlabs; ++slab) {
            const int left = part.end_chunk - part.first_chunk - slab * kSlabChunks;
            if (left > 0) stage_slab(&sums[slab * kSlabChunks * kChunkAccumulators], left);
          }
        }
      } else if (!store_directly(d, 0, kChunks)) {
#pragma unroll
        for (int chunk = 0; chunk < kChunks; chunk += kSlabChunks)
          stage_slab(&d[chunk * kChunkAccumulators], kChunks - chunk);
      }
    }
  }

  __syncthreads();
  // A CTA must not exit while its copies to other CTAs are in flight, or while others may arrive on its barriers.
  if (cluster_size > 1) ptx::cluster_sync_relaxed();
}

}  // namespace flux::gemm
