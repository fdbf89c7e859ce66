#include "gemm/launch.cuh"
#include "gemm_ar/exchange_store.cuh"
#include "gemm_ar/gemm_ar_tiles.h"

namespace flux::gemm_ar {
namespace {

gemm::TileOrder order_of(const gemm::GemmArgs& args, const gemm::Choice& choice) {
  const int block_n = gemm::kTileConfigs[choice.config].block_n;
  return {gemm::ceil_div(args.m(), gemm::kBlockM),
          gemm::ceil_div(args.n(), block_n),
          /*world_size=*/1,
          /*rank=*/0,
          choice.cluster,
          choice.group_m};
}

}  // namespace

bool sums_in_tiles(const gemm::GemmArgs& args, const gemm::Choice& choice) {
  if (!gemm::sums_in_launch(gemm::kTileConfigs[choice.config], choice.cluster)) return false;
  const gemm::TileOrder order = order_of(args, choice);
  return order.split() == 1 ||
         order.num_clusters() <= gemm::resident_clusters<ExchangeStore<true>>(order.cluster_size());
}

void gemm_ar_in_tiles(const gemm::GemmArgs& args, const gemm::Choice& choice,
                      const gemm::ExchangeParams& exchange, int num_sms, cudaStream_t stream) {
  const gemm::TileOrder order = order_of(args, choice);
  if (order.split() > 1) {
    gemm::launch<ExchangeStore<true>>(args, choice, order, args.m(), num_sms, exchange, stream);
  } else {
    gemm::launch<ExchangeStore<false>>(args, choice, order, args.m(), num_sms, exchange, stream);
  }
}

void prepare_tiles() {
  gemm::prepare_kernels<ExchangeStore<false>>();
  gemm::prepare_kernels<ExchangeStore<true>>();
}

}  // namespace flux::gemm_ar
