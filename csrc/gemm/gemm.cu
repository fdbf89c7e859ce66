#include "gemm/sm90/launch_swap_ab.cuh"

namespace flux::gemm {

void gemm(const GemmArgs& args, cudaStream_t stream) {
  const int num_sms = runtime::usable_sms(args.num_sms);
  const Choice choice = select(problem_of(args, num_sms), args.config);
  FLUX_CHECK(!args.swiglu || choice.swaps_ab(), args.m(), choice.config);
  if (choice.swaps_ab()) {
    (args.is_fp8()
         ? launch_swap_ab<LocalOutput, true>
         : launch_swap_ab<LocalOutput, false>)(args, choice, num_sms, LocalOutput::params(args), stream);
    return;
  }
  const int m_tiles = ceil_div(args.m(), kBlockM),
            n_tiles = ceil_div(args.n(), kTileConfigs[choice.config].block_n);
  const TileOrder order = {m_tiles, n_tiles, /*world_size=*/1, /*rank=*/0, choice.cluster, choice.group_m};
  (order.split() > 1 ? launch<SplitStore> : launch<LocalStore>)(args, choice, order, args.m(), num_sms, {},
                                                                stream);
}

}  // namespace flux::gemm
