// Layer 1 of a mixture of experts without its GEMM, by the device code of csrc/moe/combining_rows.cuh: CTAs of several
// ranks sum rows that another thread says are computed, chunk by chunk, and send each other the sums. Prints "all
// exact" if each token has the sum of all ranks' rows of it.
#include "moe/combining_rows.cuh"
#include "moe_ranks.h"

namespace {

using flux::moe::CombiningRows;

constexpr int kThreads = 384, kCtas = 1, kCalls = 3, kColumns = 456, kBlockN = 320;

// What a rank's product of a token with an expert holds: small integers, marked by all of them.
float product(int call, int rank, int expert, int source, int token, int column) {
  return static_cast<float>((call + 2 * rank + 3 * expert + source + token + column) % 5);
}

float weight(int token, int choice) { return static_cast<float>(1 + (token + choice) % 2); }

bool run(const Case& c) {
  const std::vector<int32_t> ids = choose_experts(c);
  const flux::moe::ColumnChunks chunks = {(kColumns + kBlockN - 1) / kBlockN, 1};
  const int block_rows = flux::moe::Layout::block_rows(c.max_tokens);
  const int blocks = flux::moe::Layout::blocks_of(c.max_tokens, block_rows);
  std::vector<Rank> ranks = make_ranks(c, ids, kColumns * 2, blocks * chunks.count());
  std::vector<float> weights(ids.size());
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = weight(i / c.top_k % c.max_tokens, i % c.top_k);
  return run_ranks(ranks, "sums", c, [&](int rank) {
    Rank& r = ranks[rank];
    const int p = c.world_size, k = c.top_k, share = r.layout.tp_size();
    std::vector<uint16_t> products(r.layout.max_rows() * kColumns), out(c.max_tokens * kColumns);
    CombiningRows::Params params = {
        r.symm,
        r.layout,
        {reinterpret_cast<const char*>(products.data()), kColumns * 2, r.positions.data(), weights.data(), k},
        chunks,
        kBlockN,
        kColumns,
        block_rows,
        blocks,
        r.incoming.data(),
        r.received.data(),
        r.sent.data(),
        out.data(),
        c.max_tokens,
        kCtas};
    bool exact = true;
    for (int number = 0; number < kCalls; ++number) {
      // The GEMM: writes a chunk of columns, then says so.
      std::thread gemm([&] {
        for (int chunk = 0; chunk < chunks.count(); ++chunk) {
          const int begin = chunk * kBlockN, end = min(begin + kBlockN, kColumns);
          for (int i = 0; i < p * c.max_tokens * k; ++i) {
            const int position = r.positions[i], expert = ids[i];
            if (position < 0) continue;
            for (int column = begin; column < end; ++column) {
              products[position * kColumns + column] = flux::gemm::to_bits(
                  product(number, rank, expert, i / k / c.max_tokens, i / k % c.max_tokens, column));
            }
          }
          for (int half = 0; half < 2 * r.num_tiles[0]; ++half) CombiningRows::stored(params, chunk);
        }
      });
      launch([&](void* shared) {
        const auto call = CombiningRows::begin(params);
        CombiningRows::combine<uint16_t>(params, call, r.num_tiles[0], shared);
        __syncthreads();
        if (threadIdx.x == 0) CombiningRows::end(params, call);
      });
      gemm.join();
      for (int token = 0; token < c.max_tokens; ++token) {
        for (int column = 0; column < kColumns; ++column) {
          float sum = 0;
          for (int choice = 0; choice < k; ++choice) {
            const int expert = ids[(rank * c.max_tokens + token) * k + choice];
            if (expert < 0) continue;
            const int slice = expert / r.layout.local_experts();
            for (int owner = slice * share; owner < (slice + 1) * share; ++owner) {
              sum += weight(token, choice) * product(number, owner, expert, rank, token, column);
            }
          }
          exact &= out[token * kColumns + column] == flux::gemm::to_bits(sum);
        }
      }
    }
    return exact;
  });
}

}  // namespace

int main() {
  // The last: nine choices and a peer are more than a batch.
  return run_program(kThreads, kCtas,
                     [] { return run({2, 1, 4, 2, 30}) && run({3, 3, 6, 5, 10}) && run({2, 1, 12, 9, 10}); });
}
