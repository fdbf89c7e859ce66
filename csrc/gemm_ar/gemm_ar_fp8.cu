#include "gemm/sm90/launch.cuh"
#include "gemm/sm90/launch_swap_ab.cuh"
#include "gemm_ar/exchange_store.cuh"
#include "gemm_ar/gemm_ar_tiles.h"

namespace flux::gemm_ar {

void gemm_ar_fp8(const gemm::GemmArgs& args, const gemm::Choice& choice, const gemm::ExchangeParams& exchange,
                 int num_sms, cudaStream_t stream) {
  if (choice.swaps_ab()) {
    gemm::launch_swap_ab<gemm::ExchangeOutput, true>(args, choice, num_sms, exchange, stream);
    return;
  }
  gemm::GemmArgs product = args;
  product.bias = nullptr;  // added to the sum
  const gemm::TileOrder order = gemm::plain_order(args, choice);
  if (order.split() > 1) {
    gemm::launch<ExchangeStore<true>, true>(product, choice, order, args.m(), num_sms, exchange, stream);
  } else {
    gemm::launch<ExchangeStore<false>, true>(product, choice, order, args.m(), num_sms, exchange, stream);
  }
}

void prepare_fp8() {
  gemm::swap_ab_kernels<gemm::ExchangeOutput, true>();
  gemm::gemm_kernels<ExchangeStore<false>, true>();
  gemm::gemm_kernels<ExchangeStore<true>, true>();
}

}  // namespace flux::gemm_ar
