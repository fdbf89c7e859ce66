// The interface between the GEMM kernel and an operator. A Store policy defines where a finished tile goes, and
// what is added to it first. It is a template parameter, because it changes code in the inner loops. Decisions made
// once a tile (order, bias) are data. docs/adding-an-op.md lists rules that the compiler does not check.
//
//   struct Params, Call      plain data among the kernel's arguments; what a thread reads once a launch (the epoch)
//   kReduces                 local tiles wait for contributions of peers (fetch, add_arrived)
//   kGathers                 some rows of x come from peers (push, admit)
//   kSplitsK                 the CTAs of a cluster share a tile, each with a part of K (sm90/gemm.cuh)
//   begin(params) -> Call    called by all threads before the first tile
//   end(params, call)        called by one thread of the CTA after it has drawn and loaded all its tiles
//   tile_counter(params)     counter from which clusters draw their next tile, zero at launch; null: fixed stride
//   is_local(params, tile)   true: the tile is stored to D; false: it goes through send and publish
//
// if kGathers, called by all threads of the first num_pushers(params) CTAs before they take part in the GEMM:
//   push(params)                               sends rows of x to peers
// called by the loader:
//   admit(params, call, tile) -> bool          waits for the rows of x that the tile needs; false: it timed out
//   source(gemm_params, call, tile)            the tensor map and row of these rows
//   block_scales(gemm_params, call, tile, x)   fp8: likewise of their block scales
// called by the storer of a math warpgroup:
//   send(params, call, tile, last_wave, warpgroup, first_chunk, num_chunks, smem)
//                                              issues bulk copies into the open group, nothing else; last_wave: the
//                                              CTA has no further tile for another rank
//   publish(params, call, tile, warpgroup)     when the half tile's bulk copies are complete (not merely read)
//   fetch(params, call, tile, warpgroup, smem, cursor)
//                                              local tiles, during their mainloop: loads the peers' contributions
//   check_peers(params, call)                  if kReduces or kGathers, after all tiles: records a failure if a peer
//                                              may have overwritten what they have read
// called by the math warpgroup:
//   row_scales(gemm_params, call, tile, x)     fp8: the scale of the tile's first row of x, without block scales
//   add_arrived(params, tile, warpgroup, smem, cursor, d)
//                                              local tiles: adds what `fetch` has loaded to the accumulators d
//
// A tile that is not local leaves in fragment order: [warpgroup][chunk of 16 columns][thread][8 elements], the
// layout of the accumulators in the registers of the 128 threads. Sender and owner run the same tile shape, so the
// owner's math threads find their own fragments: no swizzle, no tensor map of a peer, long contiguous copies.
#pragma once

#include <cuda.h>

#include "gemm/plan.h"

namespace flux::gemm {

constexpr int kChunkAccumulators = kChunkN / 2;  // per thread; 16 bytes once rounded

struct Source {
  const CUtensorMap* map;
  int row;
};

// The vector map of block scales, the position in a vector, and the vector of the first k-block.
struct BlockScaleSource {
  const CUtensorMap* map;
  int row, first_block;
};

// Base of Store policies that neither send tiles nor add peers' contributions to them.
template <class Params, class Call>
struct KeepsTiles {
  static constexpr bool kReduces = false;
  FLUX_DEVICE static bool is_local(const Params&, const Tile&) { return true; }
  FLUX_DEVICE static void send(const Params&, const Call&, const Tile&, bool, int, int, int, uint32_t) {}
  FLUX_DEVICE static void publish(const Params&, const Call&, const Tile&, int) {}
  template <class Smem>
  FLUX_DEVICE static void fetch(const Params&, const Call&, const Tile&, int, const Smem&,
                                typename Smem::Pieces&) {}
  template <class Element, class Smem, int kAccumulators>
  FLUX_DEVICE static void add_arrived(const Params&, const Tile&, int, const Smem&, typename Smem::Pieces&,
                                      float (&)[kAccumulators]) {}
};

// Base of Store policies whose x is local: so are its scales.
struct LocalScales {
  template <class GemmParams, class Call>
  FLUX_DEVICE static BlockScaleSource block_scales(const GemmParams& params, const Call&, const Tile&,
                                                   const Source& x) {
    return {&params.scales.x_blocks, x.row, 0};
  }
  template <class GemmParams, class Call>
  FLUX_DEVICE static const float* row_scales(const GemmParams& params, const Call&, const Tile&,
                                             const Source& x) {
    return params.scales.x + static_cast<int64_t>(x.row) * params.scales.x_step;
  }
};

struct Nothing {};

// Stores every tile locally, and assigns tiles to CTAs with a fixed stride: plain GEMM.
struct LocalStore : KeepsTiles<Nothing, Nothing>, LocalScales {
  using Params = Nothing;
  using Call = Nothing;
  static constexpr bool kGathers = false, kSplitsK = false;
  FLUX_DEVICE static uint32_t* tile_counter(const Params&) { return nullptr; }
  template <class GemmParams>
  FLUX_DEVICE static Source source(const GemmParams& params, const Call&, const Tile& tile) {
    return {&params.a, tile.m * kBlockM};
  }
  FLUX_DEVICE static Call begin(const Params&) { return {}; }
  FLUX_DEVICE static void end(const Params&, const Call&) {}
};

// Plain GEMM with split K.
struct SplitStore : LocalStore {
  static constexpr bool kSplitsK = true;
};

}  // namespace flux::gemm
