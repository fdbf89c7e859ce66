#include "ag_gemm/ag_gemm_fp8.h"
#include "gemm/sm90/launch.cuh"

namespace flux::ag_gemm {

void launch_fp8(const gemm::GemmArgs& args, const gemm::Choice& choice, const gemm::TileOrder& order,
                int num_sms, const GatherStore::Params& store, const OwnScales& scales, cudaStream_t stream) {
  const Layout& layout = store.layout;
  ScaledGatherStore::Params params = {store, {}, scales};
  for (int parity = 0; args.scales.blocks && parity < 2; ++parity) {
    const char* const slots = store.symm.slots(store.symm.rank, parity);
    const int64_t vectors = static_cast<int64_t>(layout.world_size - 1) * layout.scale_columns;
    params.gathered_scales[parity] = runtime::make_vector_map(
        {slots + layout.scale_offset(0), vectors, layout.rows, layout.scale_stride()}, gemm::kScaleBoxRows);
  }
  gemm::launch<ScaledGatherStore, true>(args, choice, order, layout.rows, num_sms, params, stream,
                                        store.num_pushers);
}

void prepare_fp8() { gemm::gemm_kernels<ScaledGatherStore, true>(); }

}  // namespace flux::ag_gemm
