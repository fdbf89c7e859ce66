// Layer 0 of a mixture of experts without its GEMM, by the device code of csrc/moe/arriving_rows.cuh: CTAs of several
// ranks send each other tokens and read them as tiles would. Prints "all exact" if each row is its token's.
#include "moe/arriving_rows.cuh"
#include "moe_ranks.h"

namespace {

using flux::moe::ArrivingRows;

// Three calls: both buffers, and one of them again. As few threads as can list a part's tokens.
constexpr int kThreads = 160, kCtas = 2, kCalls = 3;

// What a byte of a token holds in a call.
char value(int call, int rank, int token, int byte) {
  return static_cast<char>(call * 101 + rank * 37 + token * 7 + byte);
}

// Thread 0 of a CTA, as the scheduler's 32 lanes and what reads the rows: every kCtas-th tile, in their order.
bool read_tiles(const Rank& r, const ArrivingRows::Params& p, const flux::sync::Call& call, int number) {
  const int64_t row_bytes = p.row_bytes;
  ArrivingRows::Progress progress[32];
  const auto [first, second] = ArrivingRows::sources(p, call);
  bool exact = true;
  for (int index = blockIdx.x; index < r.num_tiles[0]; index += kCtas) {
    const flux::moe::Tile tile = flux::moe::tile_at(r.tiles.data(), 1, index);
    const int begin = r.offsets[tile.expert] + tile.m * kBlockM;
    const int end = min(begin + kBlockM, static_cast<int>(r.offsets[tile.expert + 1]));
    for (unsigned lane = 0; lane < 32; ++lane) {
      threadIdx.x = lane;
      exact &= ArrivingRows::admit(p, call, progress[lane], tile.expert, end - 1);
    }
    threadIdx.x = 0;
    for (int row = begin; row < end; ++row) {
      const int place = ArrivingRows::place(p, row);
      const char* found = place >= 0 ? first + place * row_bytes : second + ~place * row_bytes;
      const int source = r.rows[row] / r.layout.max_tokens, token = r.incoming[r.rows[row]];
      for (int byte = 0; byte < row_bytes; ++byte) {
        exact &= found[byte] == value(number, source, token, byte);
      }
    }
  }
  ArrivingRows::end(p, call);
  return exact;
}

bool run(const Case& c, int row_bytes) {
  const flux::moe::Layout layout = {c.world_size, 0, c.ep_size, c.num_experts, c.top_k, c.max_tokens};
  const int signals = flux::moe::make_send_order(layout).signals();
  std::vector<Rank> ranks = make_ranks(c, choose_experts(c), row_bytes, signals);
  return run_ranks(ranks, "tokens", c, [&](int rank) {
    const Rank& r = ranks[rank];
    std::vector<char> x(c.max_tokens * row_bytes);
    const ArrivingRows::Params params = {r.symm,        r.layout,        flux::moe::make_send_order(r.layout),
                                         x.data(),      row_bytes,       r.rows.data(),
                                         r.sent.data(), r.firsts.data(), kCtas};
    bool exact = true;
    for (int number = 0; number < kCalls; ++number) {
      for (int i = 0; i < c.max_tokens * row_bytes; ++i) {
        x[i] = value(number, rank, i / row_bytes, i % row_bytes);
      }
      char right[kCtas];
      launch([&](void* shared) {
        const auto call = ArrivingRows::begin(params);
        ArrivingRows::push(params, call, shared);
        __syncthreads();
        if (threadIdx.x == 0) right[blockIdx.x] = read_tiles(r, params, call, number);
      });
      for (const char good : right) exact &= good != 0;
    }
    return exact;
  });
}

}  // namespace

int main() {
  constexpr int kLongRow = 8208;  // more than a warp has in flight
  // So many tokens that a part is as large as parts get with four experts: several warps list its tokens.
  return run_program(kThreads, kCtas,
                     [] { return run({2, 1, 4, 2, 1100}, 48) && run({3, 3, 6, 3, 40}, kLongRow); });
}
