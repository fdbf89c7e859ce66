#include "gemm/instances.h"
#include "gemm/launch_swap_ab.cuh"

namespace flux::gemm {

void gemm_swap_ab(const GemmArgs& args, const Choice& choice, int num_sms, cudaStream_t stream) {
  const LocalOutput::Params output = {const_cast<void*>(args.out.data), args.bias, args.out.row_stride};
  launch_swap_ab<LocalOutput>(args, choice, num_sms, output, stream);
}

void prepare_swap_ab() { swap_ab_kernels<LocalOutput>(); }

}  // namespace flux::gemm
