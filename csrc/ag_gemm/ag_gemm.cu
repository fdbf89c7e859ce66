#include "ag_gemm/gather.cuh"
#include "gemm/sm90/launch.cuh"

namespace flux::ag_gemm {
namespace {

// The number of CTAs that push rows: all without an own tile at the start, but no fewer than the link needs; with a
// narrow weight it needs more (docs/design/gemm-rs.md#ctas-that-send-rows).
int choose_pushers(const gemm::TileOrder& order, int n, int num_sms) {
  constexpr int kLinkCtas = 8, kNarrowLinkCtas = 12, kNarrowColumnsPerPeer = 1500;
  const int least = n < kNarrowColumnsPerPeer * (order.world_size - 1) ? kNarrowLinkCtas : kLinkCtas;
  const int own = order.num_own_clusters() * order.cluster_size();
  const int pushers = std::max(least, num_sms - own);
  return std::min(pushers, num_sms) / order.cluster_size() * order.cluster_size();
}

ScaledGatherStore::Params scaled(const GatherStore::Params& store, const OwnScales& scales, bool blocks) {
  const Layout& layout = store.layout;
  ScaledGatherStore::Params params = {store, {}, scales};
  for (int parity = 0; blocks && parity < 2; ++parity) {
    const char* const slots = store.symm.slots(store.symm.rank, parity);
    const int64_t vectors = static_cast<int64_t>(layout.world_size - 1) * layout.scale_columns;
    params.gathered_scales[parity] = runtime::make_vector_map(
        {slots + layout.scale_offset(0), vectors, layout.rows, layout.scale_stride()}, gemm::kScaleBoxRows);
  }
  return params;
}

}  // namespace

void ag_gemm(const gemm::GemmArgs& args, const runtime::SymmBuffer& symm, const Transport& transport,
             bool reuse, cudaStream_t stream) {
  FLUX_CHECK(symm.world_size >= 2, symm.world_size);
  const int rows = args.m(), k = args.k(), m = rows * symm.world_size;
  FLUX_CHECK(args.out.rows == m, args.out.rows, m);
  FLUX_CHECK(args.x.row_stride == k, args.x.row_stride, k);
  const gemm::Scales& scales = args.scales;
  const int scale_columns = !args.is_fp8() ? 0 : scales.blocks ? k / gemm::kScaleBlock : 1;
  const Layout layout = make_layout(m, k, symm.world_size, scale_columns);
  const OwnScales own_scales = {scales.x, scales.blocks ? 1 : scales.x_step, scales.x_stride};
  check_room(layout, symm, transport);

  const int num_sms = runtime::usable_sms(args.num_sms);
  gemm::Problem problem = gemm::problem_of(args, num_sms);
  problem.m = m;
  problem.world_size = symm.world_size;
  problem.gathers = true;
  const gemm::Choice choice = gemm::select(problem, args.config);
  const gemm::TileOrder order = make_order(m, args.n(), symm.world_size, symm.rank,
                                           gemm::kTileConfigs[choice.config], choice.cluster, choice.group_m);

  const bool copied = transport.copy_epoch != 0;
  if (copied && !reuse) {
    push_by_copy_engine(symm, layout, args.x.data, transport.copy_epoch, transport.chunk_rows,
                        /*apart=*/false, stream, own_scales);
  }
  GatherStore::Params store;
  for (int parity = 0; parity < 2; ++parity) {
    const runtime::Matrix slots = {symm.slots(symm.rank, parity),
                                   static_cast<int64_t>(symm.world_size - 1) * rows, k, k};
    store.gathered[parity] =
        runtime::make_tensor_map(slots, args.x_dtype(), gemm::kTileConfigs[choice.config].block_k(),
                                 gemm::kBlockM / order.cluster_n());
  }
  store.symm = symm;
  store.layout = layout;
  store.rows = args.x.data;
  store.num_pushers = copied || reuse ? 0 : choose_pushers(order, args.n(), num_sms);
  store.blocks_per_signal = copied ? transport.chunk_rows / gemm::kBlockM : 1;
  store.epoch = transport.copy_epoch;
  store.reuse = reuse;
  if (args.is_fp8()) {
    gemm::launch_as<ScaledGatherStore, true>(args, choice, order, rows, num_sms,
                                             scaled(store, own_scales, scales.blocks), stream,
                                             store.num_pushers);
  } else {
    gemm::launch_as<GatherStore, false>(args, choice, order, rows, num_sms, store, stream, store.num_pushers);
  }
  if (copied && !reuse) runtime::CopyQueue().join(stream);  // later work on the stream may overwrite x
}

}  // namespace flux::ag_gemm
