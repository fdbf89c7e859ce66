#include "gemm/sm90/launch.cuh"
#include "gemm_ar/exchange_store.cuh"
#include "gemm_ar/gemm_ar_tiles.h"

namespace flux::gemm_ar {

void gemm_ar_in_tiles(const gemm::GemmArgs& args, const gemm::Choice& choice,
                      const gemm::ExchangeParams& exchange, int num_sms, cudaStream_t stream) {
  const gemm::TileOrder order = gemm::plain_order(args, choice);
  if (order.split() > 1) {
    gemm::launch<ExchangeStore<true>>(args, choice, order, args.m(), num_sms, exchange, stream);
  } else {
    gemm::launch<ExchangeStore<false>>(args, choice, order, args.m(), num_sms, exchange, stream);
  }
}

void prepare_tiles() {
  gemm::gemm_kernels<ExchangeStore<false>>();
  gemm::gemm_kernels<ExchangeStore<true>>();
}

}  // namespace flux::gemm_ar
