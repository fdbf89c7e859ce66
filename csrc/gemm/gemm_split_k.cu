#include "gemm/instances.h"
#include "gemm/sm90/launch.cuh"

namespace flux::gemm {

void gemm_split_k(const GemmArgs& args, const Choice& choice, const TileOrder& order, int num_sms,
                  cudaStream_t stream) {
  launch<SplitStore>(args, choice, order, args.m(), num_sms, {}, stream);
}

void prepare_split_k() { gemm_kernels<SplitStore>(); }

}  // namespace flux::gemm
