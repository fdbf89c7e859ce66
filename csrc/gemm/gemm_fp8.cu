#include "gemm/instances.h"
#include "gemm/sm90/launch.cuh"
#include "gemm/sm90/launch_swap_ab.cuh"

namespace flux::gemm {

void gemm_fp8(const GemmArgs& args, const Choice& choice, int num_sms, cudaStream_t stream) {
  if (choice.swaps_ab()) {
    launch_swap_ab<LocalOutput, true>(args, choice, num_sms, LocalOutput::params(args), stream);
    return;
  }
  const TileOrder order = plain_order(args, choice);
  if (order.split() > 1) {
    launch<SplitStore, true>(args, choice, order, args.m(), num_sms, {}, stream);
  } else {
    launch<LocalStore, true>(args, choice, order, args.m(), num_sms, {}, stream);
  }
}

void prepare_fp8() {
  gemm_kernels<LocalStore, true>();
  gemm_kernels<SplitStore, true>();
  swap_ab_kernels<LocalOutput, true>();
}

}  // namespace flux::gemm
