// Layer 0 of a mixture of experts without its GEMM, by the device code of csrc/moe/arriving_rows.cuh: CTAs of several
// ranks send each other tokens and read them as tiles would. Prints "all exact" if each row is its token's.
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "moe/arriving_rows.cuh"
#include "moe/routing.h"

namespace {

using flux::moe::ArrivingRows;
using flux::moe::Layout;

// Three calls: both buffers, and one of them again. As few threads as can list a part's tokens.
constexpr int kThreads = 160, kCtas = 2, kCalls = 3, kRowBytes = 48, kBlockM = 8;

struct Case {
  int world_size, ep_size, num_experts, top_k, max_tokens;
};

// What a byte of a token holds in a call.
char value(int call, int rank, int token, int byte) {
  return static_cast<char>(call * 101 + rank * 37 + token * 7 + byte);
}

struct Rank {
  Layout layout;
  std::vector<char> buffer, x;
  std::vector<int32_t> offsets, counts, rows, positions, incoming, received, sent, firsts, num_tiles;
  std::vector<flux::moe::TileEntry> tiles;
  flux::runtime::ErrorRecord error = {};
  ArrivingRows::Params params = {};
};

void route(Rank& r, const std::vector<int32_t>& ids) {
  const Layout& l = r.layout;
  const int p = l.world_size, experts = l.local_experts();
  r.offsets.resize(experts + 1);
  r.counts.resize(experts * p);
  r.rows.resize(l.max_rows());
  r.positions.resize(p * l.max_tokens * l.top_k);
  r.incoming.resize(p * l.max_tokens);
  r.received.resize(p);
  r.sent.resize(l.ep_size * l.max_tokens);
  r.firsts.resize(l.ep_size * l.max_tokens);
  r.tiles.resize(l.max_tiles(kBlockM));
  r.num_tiles.resize(1);
  flux::moe::route_on_host(
      l, kBlockM, ids.data(),
      {r.offsets.data(), r.counts.data(), r.rows.data(), r.positions.data(), r.incoming.data(),
       r.received.data(), r.sent.data(), r.firsts.data(), r.tiles.data(), r.num_tiles.data()});
}

// Thread 0 of a CTA, as the scheduler's 32 lanes and what reads the rows: every kCtas-th tile, in their order.
bool read_tiles(const Rank& r, const flux::sync::Call& call, int number) {
  const ArrivingRows::Params& p = r.params;
  const Layout& l = r.layout;
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
      const char* found =
          place >= 0 ? first + int64_t{place} * kRowBytes : second + int64_t{~place} * kRowBytes;
      const int source = r.rows[row] / l.max_tokens, token = r.incoming[r.rows[row]];
      for (int byte = 0; byte < kRowBytes; ++byte) exact &= found[byte] == value(number, source, token, byte);
    }
  }
  ArrivingRows::end(p, call);
  return exact;
}

bool run(const Case& c) {
  const int p = c.world_size;
  std::vector<Rank> ranks(p);
  std::vector<int32_t> ids(p * c.max_tokens * c.top_k);
  std::mt19937 random(c.max_tokens);
  for (int32_t& id : ids) id = static_cast<int>(random() % (c.num_experts + 1)) - 1;  // -1: not routed
  const int64_t slot_bytes = int64_t{p - 1} * c.max_tokens * kRowBytes;
  for (int rank = 0; rank < p; ++rank) {
    Rank& r = ranks[rank];
    r.layout = {p, rank, c.ep_size, c.num_experts, c.top_k, c.max_tokens};
    route(r, ids);
    r.x.resize(c.max_tokens * kRowBytes);
    const auto order = flux::moe::make_send_order(r.layout);
    const int64_t signal_bytes = int64_t{order.signals()} * (p - 1) * 4;
    r.buffer.resize(flux::runtime::kHeaderBytes + signal_bytes + 2 * slot_bytes);
    r.params.symm.signal_bytes = signal_bytes;
    r.params.order = order;
  }
  for (int rank = 0; rank < p; ++rank) {
    Rank& r = ranks[rank];
    r.params.symm.rank = rank;
    r.params.symm.world_size = p;
    for (int peer = 0; peer < p; ++peer)
      r.params.symm.peers[peer] = reinterpret_cast<uint64_t>(ranks[peer].buffer.data());
    r.params.symm.slot_bytes = slot_bytes;
    r.params.symm.error = &r.error;
    r.params.symm.timeout_ns = 60'000'000'000;
    r.params.layout = r.layout;
    r.params.x = r.x.data();
    r.params.row_bytes = kRowBytes;
    r.params.rows = r.rows.data();
    r.params.sent = r.sent.data();
    r.params.firsts = r.firsts.data();
    r.params.num_pushers = kCtas;
  }
  std::vector<std::thread> hosts;
  std::vector<char> exact(p, true);
  for (int rank = 0; rank < p; ++rank) {
    hosts.emplace_back([&, rank] {
      Rank& r = ranks[rank];
      for (int number = 0; number < kCalls; ++number) {  // launches, one after the other
        for (int token = 0; token < c.max_tokens; ++token) {
          for (int byte = 0; byte < kRowBytes; ++byte)
            r.x[token * kRowBytes + byte] = value(number, rank, token, byte);
        }
        std::vector<std::vector<char>> shared(kCtas, std::vector<char>(1 << 16));
        std::vector<std::thread> threads;
        std::vector<char> right(kCtas, true);
        std::barrier<> barriers[kCtas] = {std::barrier<>(kThreads), std::barrier<>(kThreads)};
        for (int thread = 0; thread < kCtas * kThreads; ++thread) {
          threads.emplace_back([&, thread] {
            blockIdx.x = thread / kThreads;
            threadIdx.x = thread % kThreads;
            cta = &barriers[blockIdx.x];
            const auto call = ArrivingRows::begin(r.params);
            ArrivingRows::push(r.params, call, shared[blockIdx.x].data());
            __syncthreads();
            if (threadIdx.x == 0) right[blockIdx.x] = read_tiles(r, call, number);
          });
        }
        for (std::thread& thread : threads) thread.join();
        for (const char good : right) exact[rank] &= good;
      }
    });
  }
  for (std::thread& host : hosts) host.join();
  bool all = true;
  for (const char good : exact) all &= good != 0;
  if (!all)
    std::printf("wrong: %d ranks, ep_size %d, %d experts, %d tokens\n", p, c.ep_size, c.num_experts,
                c.max_tokens);
  return all;
}

}  // namespace

int main() {
  blockDim.x = kThreads;
  gridDim.x = kCtas;
  bool all = true;
  for (const Case& c : {Case{2, 1, 4, 2, 150}, Case{3, 3, 6, 3, 40}}) all &= run(c);
  if (all) std::printf("all exact\n");
  return all ? 0 : 1;
}
