#include <algorithm>

#include "moe/ag_scatter_gemm.h"
#include "moe/arriving_rows.cuh"
#include "moe/grouped_launch.cuh"

namespace flux::moe {

void ag_scatter_gemm(const GroupedGemmArgs& args, const Layout& layout, const RoutingArrays& routing,
                     const runtime::SymmBuffer& symm, cudaStream_t stream) {
  FLUX_CHECK(symm.world_size == layout.world_size && symm.world_size >= 2, symm.world_size,
             layout.world_size);
  const int row_bytes = static_cast<int>(args.x.columns) * gemm::kElementBytes;
  const int peers = symm.world_size - 1;
  FLUX_CHECK(static_cast<int64_t>(peers) * layout.max_tokens * row_bytes <= symm.slot_bytes, symm.slot_bytes);
  FLUX_CHECK(peers * layout.max_blocks() * 4 <= symm.signal_bytes, symm.signal_bytes);
  FLUX_CHECK(args.experts == layout.local_experts(), args.experts, layout.local_experts());

  constexpr int kPushers = 16;  // CTAs that fill the link: 8 of them store 339 GB/s, 132 352
  const int num_sms = args.num_sms > 0 ? args.num_sms : runtime::num_sms();
  const ArrivingRows::Params rows = {symm,
                                     layout,
                                     static_cast<const char*>(args.x.data),
                                     row_bytes,
                                     routing.rows,
                                     routing.received,
                                     routing.outgoing,
                                     routing.sending,
                                     std::min(kPushers, num_sms)};
  const int expected = std::max(1, layout.tokens() * layout.top_k / layout.ep_size);
  launch_grouped<ArrivingRows>(args, {routing.offsets, routing.tiles, routing.num_tiles}, expected, rows,
                               stream);
}

void prepare_ag_scatter_gemm() { prepare_grouped_kernels<ArrivingRows>(); }

}  // namespace flux::moe
