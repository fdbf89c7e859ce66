// The tile order of a GEMM without communication: all rows belong to one shard.
#pragma once

#include "gemm/gemm.h"
#include "gemm/select.h"

namespace flux::gemm {

inline TileOrder plain_order(const GemmArgs& args, const Choice& choice) {
  return {ceil_div(args.m(), kBlockM),
          ceil_div(args.n(), kTileConfigs[choice.config].block_n),
          /*world_size=*/1,
          /*rank=*/0,
          choice.cluster,
          choice.group_m};
}

}  // namespace flux::gemm
