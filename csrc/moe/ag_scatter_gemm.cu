
#include "moe/arriving_rows.cuh"
#include "moe/grouped_launch.cuh"

namespace flux::moe {

void ag_scatter_gemm(const GroupedGemmArgs& args, const Layout& layout, const RoutingArrays& routing,
                     const runtime::SymmBuffer& symm, cudaStream_t stream) {
  const int k = static_cast<int>(args.x.columns);
  check_layout(args, layout, symm);
  const SendOrder order = make_send_order(layout);
  const int row_bytes = k * args.operand_bytes();
  check_room(layout, symm, args.is_fp8() ? slot_row_bytes(k, args.scale_columns()) : row_bytes,
             order.signals());

  const int num_sms = runtime::usable_sms(args.num_sms);
  const ArrivingRows::Params rows = {
      symm,         layout,       order,          static_cast<const char*>(args.x.data),      row_bytes,
      routing.rows, routing.sent, routing.firsts, /*num_pushers=*/std::min(kPushers, num_sms)};
  const Schedule schedule = {routing.offsets, routing.tiles, routing.num_tiles};
  if (!args.is_fp8()) {
    launch_grouped_as<ArrivingRows, false>(args, schedule, layout.expected_rows(), rows, stream);
    return;
  }
  const gemm::Scales& s = args.scales;
  ScaledArrivingRows::Params scaled = {rows};
  scaled.scales = s.x;
  scaled.step = s.blocks ? 1 : s.x_step;
  scaled.stride = s.x_stride;
  scaled.columns = args.scale_columns();
  scaled.slot_row_bytes = slot_row_bytes(row_bytes, scaled.columns);
  launch_grouped_as<ScaledArrivingRows, true>(args, schedule, layout.expected_rows(), scaled, stream);
}

}  // namespace flux::moe
