#include "gemm/launch.cuh"
#include "gemm_rs/gemm_rs.h"
#include "gemm_rs/store.cuh"

namespace flux::gemm_rs {

void gemm_rs(const gemm::GemmArgs& args, const runtime::SymmBuffer& symm, cudaStream_t stream) {
  FLUX_CHECK(symm.world_size >= 2, symm.world_size);
  const int num_sms = args.num_sms > 0 ? args.num_sms : runtime::num_sms();
  const gemm::Problem problem = {args.m(),        args.n(), args.k(), args.transpose_weight,
                                 symm.world_size, num_sms};
  const gemm::Choice choice = gemm::select(problem, args.config);
  const Layout layout = make_layout(args.m(), args.n(), symm.world_size, gemm::kTileConfigs[choice.config]);
  FLUX_CHECK(args.m() % symm.world_size == 0, args.m(), symm.world_size);
  FLUX_CHECK(layout.slot_bytes() <= symm.slot_bytes, layout.slot_bytes(), symm.slot_bytes);
  FLUX_CHECK(layout.num_signals() * 4 <= symm.signal_bytes, layout.num_signals(), symm.signal_bytes);

  const int rows_per_shard = args.m() / symm.world_size;
  const gemm::TileOrder order = make_order(layout, symm.rank, choice.cluster, choice.group_m);
  const Pace pace = make_pace(order, (args.k() + gemm::kBlockK - 1) / gemm::kBlockK, num_sms);
  gemm::launch<SlotStore>(args, choice, order, rows_per_shard, num_sms,
                          {symm, layout, pace, rows_per_shard, args.n()}, stream);
}

void prepare() { gemm::prepare_kernels<SlotStore>(); }

}  // namespace flux::gemm_rs
