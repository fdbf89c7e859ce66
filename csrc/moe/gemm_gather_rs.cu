
#include "moe/combining_rows.cuh"
#include "moe/grouped_launch.cuh"

namespace flux::moe {

void gemm_gather_rs(const GroupedGemmArgs& args, const CombineArgs& combine, const Layout& layout,
                    const RoutingArrays& routing, const runtime::SymmBuffer& symm, cudaStream_t stream) {
  check_layout(args, layout, symm);
  FLUX_CHECK(args.config >= 0 && combine.tiles_per_chunk > 0, args.config, combine.tiles_per_chunk);
  FLUX_CHECK(combine.communication_ctas >= 0, combine.communication_ctas);
  const int num_sms = runtime::usable_sms(args.num_sms);
  const int n = args.n();
  const int block_n = gemm::kTileConfigs[args.config].block_n;
  const ColumnChunks chunks = {ceil_div(n, block_n), combine.tiles_per_chunk};
  const int block_rows = Layout::block_rows(layout.max_tokens);
  const int blocks = Layout::blocks_of(layout.max_tokens, block_rows);
  check_room(layout, symm, n * gemm::kResultBytes, static_cast<int64_t>(blocks) * chunks.count());
  FLUX_CHECK(chunks.count() <= runtime::kMaxPushBlocks, chunks.count());

  const int64_t row_bytes = static_cast<int64_t>(n) * gemm::kResultBytes;
  const Products products = {static_cast<const char*>(args.out), row_bytes, routing.positions,
                             combine.weights, layout.top_k};
  const CombiningRows::Params rows = {
      .symm = symm,
      .layout = layout,
      .products = products,
      .chunks = chunks,
      .block_n = block_n,
      .n = n,
      .block_rows = block_rows,
      .blocks = blocks,
      .incoming = routing.incoming,
      .received = routing.received,
      .sent = routing.sent,
      .out = combine.out,
      .num_tokens = combine.num_tokens,
      .communication_ctas = std::min(combine.communication_ctas, num_sms - 1)};
  const Schedule schedule = {routing.offsets, routing.tiles, routing.num_tiles};
  launch_grouped<CombiningRows>(args, schedule, layout.expected_rows(), rows, stream,
                                combine.tiles_per_chunk);
}

}  // namespace flux::moe
