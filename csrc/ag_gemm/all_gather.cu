// AllGather without a GEMM: the transports of AllGather+GEMM, and a kernel that copies the rows as they arrive.

#include <algorithm>

#include "ag_gemm/gather.cuh"

namespace flux::ag_gemm {
namespace {

constexpr int kThreads = kPushThreads;
// They saturate links and memory (docs/design/gemm-rs.md#ctas-that-send-rows); ranks may share one GPU.
constexpr int kCtas = 64, kCtasOfAllRanks = 384, kCtasPerSm = 3;
constexpr int kCopyBytes = 65536;

struct Params {
  runtime::SymmBuffer symm;
  Layout layout;
  const char* rows;
  char* out;
  bool push;
  int blocks_per_signal;
  uint32_t epoch;  // if the host counts the epochs (copy engines): the epoch of the call; else 0
  bool reuse;
  CollectedScales scales;  // with `reuse`
};

// Copies the scales of all ranks' rows, which are here if the rows are.
__device__ void copy_scales(const Params& p, const sync::Call& call) {
  const Layout& layout = p.layout;
  const OwnScales& own = p.scales.own;
  const int rank = p.symm.rank, all_rows = layout.rows * layout.world_size, stride = (all_rows + 3) / 4 * 4;
  const char* const slots = p.symm.slots(rank, call.epoch);
  const int64_t count = static_cast<int64_t>(all_rows) * p.scales.columns;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int column = static_cast<int>(i / all_rows), in_all = static_cast<int>(i % all_rows);
    const int source = in_all / layout.rows, row = in_all % layout.rows;
    float value = __int_as_float(0x7FFFFFFF);
    if (source == rank) {
      value = own.data[row * own.step + column * own.stride];
    } else if (!call.aborted) {
      const char* const slot = slots + layout.scale_offset(runtime::slot_index(source, rank));
      const int place = place_of_scale(row, own.step, p.epoch != 0);
      value = reinterpret_cast<const float*>(slot)[column * layout.scale_stride() + place];
    }
    p.scales.out[column * static_cast<int64_t>(stride) + in_all] = value;
  }
}

// With scales it is a kernel of its own: in one kernel for both, rows without scales arrived up to 20 % later.
template <bool kScales>
__global__ void __launch_bounds__(kThreads, kCtasPerSm) all_gather_kernel(const __grid_constant__ Params p) {
  __shared__ bool here;
  const sync::Call call = begin_gather(p.symm, p.epoch, p.reuse);
  const Layout& layout = p.layout;
  if (p.push) push_rows(p.symm, layout, p.rows, call, gridDim.x);
  const int rank = p.symm.rank, world_size = p.symm.world_size;
  const Pieces copies = make_pieces(layout, kCopyBytes);
  for (int copy = blockIdx.x; copy < copies.count(world_size); copy += gridDim.x) {
    const Piece piece = copies.at(copy);
    if (piece.bytes == 0) continue;
    const int source = (rank + world_size - piece.peer) % world_size, block = piece.block;
    const int row = block * gemm::kBlockM;
    const char* src = p.rows + static_cast<int64_t>(row) * layout.row_bytes;
    if (source != rank) {
      const int slot = runtime::slot_index(source, rank);
      src = p.symm.slots(rank, call.epoch) + layout.offset(slot, row);
      if (threadIdx.x == 0) {
        // With `reuse`, the previous launch has already waited for these rows, or has timed out.
        const uint32_t* signal = p.symm.signal(rank, slot, block / p.blocks_per_signal);
        here = p.reuse ? !call.aborted
                       : sync::wait_signal(p.symm, signal, call.epoch,
                                           {runtime::kAllGather, static_cast<uint32_t>(source),
                                            static_cast<uint32_t>(block)});
      }
      __syncthreads();
      // A wait timed out. The host will raise an error; until then the rows are NaN.
      if (!here) src = nullptr;
    }
    char* dst = p.out + source * layout.shard_bytes() + static_cast<int64_t>(row) * layout.row_bytes;
    const char* from = src == nullptr ? nullptr : src + piece.offset;
    runtime::copy_bytes<kThreads>(dst + piece.offset, from, piece.bytes, threadIdx.x);
    __syncthreads();  // `here` is about to be written again
  }
  if constexpr (kScales) copy_scales(p, call);
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (p.epoch != 0) sync::check_peers(p.symm, call, runtime::kAllGather);
  sync::end_call(p.symm, call.epoch, p.reuse);
}

runtime::Kernels kernels([] { runtime::load(all_gather_kernel<false>, all_gather_kernel<true>); });

Layout checked_layout(const runtime::Matrix& x, const runtime::SymmBuffer& symm, const Transport& transport,
                      int scale_columns = 0) {
  FLUX_CHECK(symm.world_size >= 2, symm.world_size);
  FLUX_CHECK(x.row_stride == x.columns, x.row_stride);
  const int rows = static_cast<int>(x.rows), k = static_cast<int>(x.columns);
  // Elements have two bytes; those of fp8 count as half as many.
  const Layout layout = {rows, k * gemm::kResultBytes, symm.world_size, scale_columns};
  check_room(layout, symm, transport);
  return layout;
}

}  // namespace

void push_by_copy_engine(const runtime::SymmBuffer& symm, const Layout& layout, const void* rows,
                         uint32_t epoch, int chunk_rows, bool apart, cudaStream_t stream,
                         const OwnScales& scales) {
  FLUX_CHECK(chunk_rows > 0 && chunk_rows % gemm::kBlockM == 0, chunk_rows);
  runtime::CopyQueue queue;
  queue.follow(stream);
  for (int i = 1; i < symm.world_size; ++i) {
    const int peer = (symm.rank + i) % symm.world_size;
    const int slot = runtime::slot_index(symm.rank, peer);
    for (int row = 0, chunk = 0; row < layout.rows; row += chunk_rows, ++chunk) {
      const int64_t count = std::min(chunk_rows, layout.rows - row);
      const char* src = static_cast<const char*>(rows) + static_cast<int64_t>(row) * layout.row_bytes;
      queue.copy(symm.slots(peer, epoch) + layout.offset(slot, row), src, count * layout.row_bytes);
      if (layout.scale_columns > 0) {
        auto* const to = reinterpret_cast<float*>(symm.slots(peer, epoch) + layout.scale_offset(slot));
        if (scales.step > 0) {
          queue.copy_rows(to + row, layout.scale_stride() * 4, scales.data + row, scales.stride * 4,
                          count * 4, layout.scale_columns);
        } else if (chunk == 0) {
          queue.copy(to, scales.data, 4);
        }
      }
      uint32_t* const signal = symm.signal(peer, slot, chunk);
      const bool last = i + 1 == symm.world_size && row + chunk_rows >= layout.rows;
      if (apart && !last) {  // no copy would wait for the last signal
        queue.announce(signal, epoch);
      } else {
        queue.write(signal, epoch);
      }
    }
  }
  queue.submit();
}

void begin_all_gather(const runtime::Matrix& x, const runtime::SymmBuffer& symm, const Transport& transport,
                      cudaStream_t stream) {
  const Layout layout = checked_layout(x, symm, transport);
  push_by_copy_engine(symm, layout, x.data, transport.copy_epoch, transport.chunk_rows, /*apart=*/false,
                      stream);
}

void all_gather(const runtime::Matrix& x, const runtime::Matrix& out, const runtime::SymmBuffer& symm,
                const Transport& transport, Rows rows, const CollectedScales& scales, cudaStream_t stream) {
  const Layout layout = checked_layout(x, symm, transport, scales.columns);
  FLUX_CHECK(out.row_stride == out.columns && out.columns == x.columns, out.row_stride, out.columns);
  FLUX_CHECK(out.rows == x.rows * symm.world_size, out.rows);
  const bool copied = transport.copy_epoch != 0, push = rows == Rows::kToSend && !copied;
  FLUX_CHECK(rows != Rows::kBegun || copied, copied);
  if (rows == Rows::kToSend && copied) {
    push_by_copy_engine(symm, layout, x.data, transport.copy_epoch, transport.chunk_rows, /*apart=*/true,
                        stream);
  }
  const bool arrive_copied = copied && rows != Rows::kHere;
  const Params params = {.symm = symm,
                         .layout = layout,
                         .rows = static_cast<const char*>(x.data),
                         .out = static_cast<char*>(const_cast<void*>(out.data)),
                         .push = push,
                         .blocks_per_signal = arrive_copied ? transport.chunk_rows / gemm::kBlockM : 1,
                         .epoch = transport.copy_epoch,
                         .reuse = rows == Rows::kHere,
                         .scales = scales};
  const int ctas = std::min(kCtas, kCtasOfAllRanks / symm.world_size);
  runtime::Launch(ctas, kThreads, 0, stream)
      .run(scales.columns > 0 ? all_gather_kernel<true> : all_gather_kernel<false>, params);
  if (arrive_copied) runtime::CopyQueue().join(stream);  // later work on the stream may overwrite x
}

}  // namespace flux::ag_gemm
