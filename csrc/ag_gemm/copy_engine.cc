#include <algorithm>

#include "ag_gemm/ag_gemm.h"
#include "runtime/check.h"
#include "runtime/copy_queue.h"

namespace flux::ag_gemm {

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

}  // namespace flux::ag_gemm
