#include "gemm/sm90/launch.cuh"
#include "gemm_rs/gemm_rs_fp8.h"

namespace flux::gemm_rs {

void launch_fp8(const gemm::GemmArgs& args, const gemm::Choice& choice, const gemm::TileOrder& order,
                int rows_per_shard, int num_sms, const SlotStore::Params& store, cudaStream_t stream) {
  gemm::launch<SlotStore, true>(args, choice, order, rows_per_shard, num_sms, store, stream);
}

void prepare_fp8() { gemm::gemm_kernels<SlotStore, true>(); }

}  // namespace flux::gemm_rs
