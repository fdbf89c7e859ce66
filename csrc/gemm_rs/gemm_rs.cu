#include "gemm/sm90/launch.cuh"
#include "gemm_rs/store.cuh"

namespace flux::gemm_rs {

namespace {

// Enqueues the copies, after the launch. Each waits for the tiles of this rank's launch, and the launch for the peers'
// copies. Chunks leave in the order in which they are computed.
void send_staged(const runtime::SymmBuffer& symm, const Layout& layout, const Chunks& chunks,
                 const Transport& transport, cudaStream_t stream) {
  runtime::CopyQueue queue;
  for (int i = 1; i < symm.world_size; ++i) {
    const int peer = (symm.rank + i) % symm.world_size;
    const int from = runtime::slot_index(peer, symm.rank), to = runtime::slot_index(symm.rank, peer);
    for (int chunk = 0; chunk < chunks.count; ++chunk) {
      uint32_t* const staged = &symm.header()->pieces_staged[from * chunks.count + chunk];
      queue.wait(staged, chunks.size(chunk) * gemm::kNumMathWarpgroups);
      const int64_t offset = static_cast<int64_t>(chunks.first(chunk)) * layout.tile_bytes;
      queue.copy(symm.slots(peer, transport.copy_epoch) + layout.tile_offset(to, 0, 0) + offset,
                 transport.staging + layout.tile_offset(from, 0, 0) + offset,
                 static_cast<int64_t>(chunks.size(chunk)) * layout.tile_bytes);
      queue.write(symm.signal(peer, to, chunk), transport.copy_epoch);
      queue.write(staged, 0);
    }
  }
  queue.join(stream);
}

}  // namespace

void gemm_rs(const gemm::GemmArgs& args, const runtime::SymmBuffer& symm, const Transport& transport,
             bool rounds_own, cudaStream_t stream) {
  FLUX_CHECK(symm.world_size >= 2, symm.world_size);
  const int num_sms = runtime::usable_sms(args.num_sms);
  gemm::Problem problem = gemm::problem_of(args, num_sms);
  problem.world_size = symm.world_size;
  const gemm::Choice choice = gemm::select(problem, args.config);
  const Layout layout = make_layout(args.m(), args.n(), symm.world_size, gemm::kTileConfigs[choice.config]);
  FLUX_CHECK(args.m() % symm.world_size == 0, args.m(), symm.world_size);
  FLUX_CHECK(layout.slot_bytes() <= symm.slot_bytes, layout.slot_bytes(), symm.slot_bytes);
  FLUX_CHECK(layout.num_signals() * 4 <= symm.signal_bytes, layout.num_signals(), symm.signal_bytes);

  const bool copied = transport.copy_epoch != 0;
  const Chunks chunks = {copied ? transport.chunks : 1, layout.tiles_per_slot()};
  FLUX_CHECK(chunks.count >= 1 && chunks.count <= chunks.tiles, chunks.count, chunks.tiles);
  FLUX_CHECK(!copied || chunks.count * (symm.world_size - 1) <= runtime::kMaxStagedChunks, chunks.count);
  const int rows_per_shard = args.m() / symm.world_size;
  const gemm::TileOrder order = make_order(layout, symm.rank, choice.cluster, choice.group_m, copied);
  const Pace pace =
      make_pace(order, gemm::ceil_div(args.k(), gemm::kTileConfigs[choice.config].block_k()), num_sms);
  const SlotStore::Params store = {
      symm,           layout,   pace,      transport.copy_epoch, chunks, transport.staging,
      rows_per_shard, args.n(), rounds_own};
  gemm::launch<SlotStore>(args, choice, order, rows_per_shard, num_sms, store, stream);
  if (copied) send_staged(symm, layout, chunks, transport, stream);
}

}  // namespace flux::gemm_rs
