#include "gemm/instances.h"
#include "gemm/sm90/launch_swap_ab.cuh"

namespace flux::gemm {

void gemm_swap_ab(const GemmArgs& args, const Choice& choice, int num_sms, cudaStream_t stream) {
  launch_swap_ab<LocalOutput>(args, choice, num_sms, LocalOutput::params(args), stream);
}

void prepare_swap_ab() { swap_ab_kernels<LocalOutput>(); }

}  // namespace flux::gemm
