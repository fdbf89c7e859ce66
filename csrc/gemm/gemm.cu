#include "gemm/gemm.h"
#include "gemm/instances.h"
#include "gemm/sm90/launch.cuh"

namespace flux::gemm {

void gemm(const GemmArgs& args, cudaStream_t stream) {
  const int num_sms = runtime::usable_sms(args.num_sms);
  const Choice choice = select(problem_of(args, num_sms), args.config);
  FLUX_CHECK(!args.swiglu || choice.swaps_ab(), args.m(), choice.config);
  if (args.is_fp8()) {
    gemm_fp8(args, choice, num_sms, stream);
    return;
  }
  if (choice.swaps_ab()) {
    gemm_swap_ab(args, choice, num_sms, stream);
    return;
  }
  const TileOrder order = plain_order(args, choice);
  if (order.split() > 1) {
    gemm_split_k(args, choice, order, num_sms, stream);
  } else {
    launch<LocalStore>(args, choice, order, args.m(), num_sms, {}, stream);
  }
}

void prepare() {
  gemm_kernels<LocalStore>();
  prepare_split_k();
  prepare_swap_ab();
  prepare_fp8();
}

}  // namespace flux::gemm
