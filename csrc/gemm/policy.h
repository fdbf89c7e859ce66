// The contract between the GEMM kernel and an op: where a finished tile goes, and what is added to it before.
// A Store is a type because it changes code on the inner path; everything that is decided once a tile (order,
// bias) is data.
//
//   struct Params            plain data, part of the kernel's arguments
//   struct Call              what a thread learns once a launch (the epoch), and a storer's own state
//   kReduces                 own tiles wait for what peers contribute (fetch, add_arrived)
//   kGathers                 some of x comes from peers (push, admit)
//   kSplitsK                 the CTAs of a cluster share a tile, each with a part of K (split_k.cuh)
//   kExchanges               ranks exchange rows of the product (contribute), and sum them at the end (finish)
//   begin(params) -> Call    all threads, before the first tile
//   end(params, call)        one thread of the CTA, when it has drawn and loaded all its tiles
//   tile_counter(params)     where clusters draw their next tile, zero at launch; null: by a fixed stride
//   is_local(params, tile)   true: the tile is stored to D; false: it goes through send and publish
//
// called by the loader:
//   admit(params, call, tile) -> bool
//                            waits until the rows of x that the tile needs are here; false: they will not come
//   source(gemm_params, call, tile) -> Source
//                            where they lie
//
// where kGathers, by all threads of the first num_pushers(params) CTAs, before they take part in the GEMM:
//   push(params)             sends rows of x to peers
//
// called by the storer of a math warpgroup:
//   send(params, call, tile, last_wave, warpgroup, first_chunk, num_chunks, smem)
//                            bulk copies into the open group, nothing else; last_wave: the CTA has no further
//                            tile for another rank
//   publish(params, call, tile, warpgroup)
//                            the half tile's bulk copies are complete (not merely read)
//   fetch(params, call, tile, warpgroup, smem, cursor)
//                            local tiles, while their mainloop runs: loads what peers contributed, in pieces
//
// and by the math warpgroup:
//   add_arrived(params, tile, warpgroup, smem, cursor, d)
//                            local tiles: adds those pieces to the accumulators d
//
// where kExchanges, by the math threads, and instead of all that storers do:
//   contribute(params, call, tile, smem, warpgroup, thread, first_chunk, end_chunk, sums)
//                            half a tile, or of a split one those chunks of it: each row goes to whoever sums it
//   finish(params, call, thread, spare)
//                            after all tiles
//
// A tile that is not local leaves in fragment order: [warpgroup][chunk of 16 columns][thread][8 elements],
// exactly as the accumulators lie in the registers of the 128 threads. Sender and owner run the same tile
// shape, so the owner's math threads find their own fragments: no swizzle, no peer tensor map, long
// contiguous copies both ways.
#pragma once

#include <cuda.h>

#include "gemm/tile_order.h"

namespace flux::gemm {

constexpr int kChunkAccumulators = kChunkN / 2;  // per thread; 16 bytes once rounded

struct Source {
  const CUtensorMap* map;
  int row;
};

// What stores have in common that send no tile, and add nothing to one.
template <class Params, class Call>
struct KeepsTiles {
  static constexpr bool kReduces = false;
#ifdef __CUDACC__
  FLUX_DEVICE static bool is_local(const Params&, const Tile&) { return true; }
  FLUX_DEVICE static void send(const Params&, const Call&, const Tile&, bool, int, int, int, uint32_t) {}
  FLUX_DEVICE static void publish(const Params&, const Call&, const Tile&, int) {}
  template <class Smem>
  FLUX_DEVICE static void fetch(const Params&, const Call&, const Tile&, int, const Smem&,
                                typename Smem::Pieces&) {}
  template <class Element, class Smem, int kAccumulators>
  FLUX_DEVICE static void add_arrived(const Params&, const Tile&, int, const Smem&, typename Smem::Pieces&,
                                      float (&)[kAccumulators]) {}
#endif
};

// The same where x is all here and tiles are not drawn.
template <class Params, class Call>
struct FixedTiles : KeepsTiles<Params, Call> {
  static constexpr bool kGathers = false;
#ifdef __CUDACC__
  FLUX_DEVICE static uint32_t* tile_counter(const Params&) { return nullptr; }
  template <class GemmParams>
  FLUX_DEVICE static Source source(const GemmParams& params, const Call&, const Tile& tile) {
    return {&params.a, tile.m * kBlockM};
  }
#endif
};

struct Nothing {};

// Everything stays here: plain GEMM.
struct LocalStore : FixedTiles<Nothing, Nothing> {
  using Params = Nothing;
  using Call = Nothing;
  static constexpr bool kSplitsK = false;
  static constexpr bool kExchanges = false;
#ifdef __CUDACC__
  FLUX_DEVICE static Call begin(const Params&) { return {}; }
  FLUX_DEVICE static void end(const Params&, const Call&) {}
#endif
};

// The same for few tiles and a long K.
struct SplitStore : LocalStore {
  static constexpr bool kSplitsK = true;
};

}  // namespace flux::gemm
