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

constexpr flux::moe::ColumnChunks kChunks = {(kColumns + kBlockN - 1) / kBlockN, 1};

std::vector<Rank> ranks_of(const Case& c, const std::vector<int32_t>& ids) {
  const int blocks = flux::moe::Layout::blocks_of(c.max_tokens, flux::moe::Layout::block_rows(c.max_tokens));
  return make_ranks(c, ids, kColumns * 2, blocks * kChunks.count());
}

CombiningRows::Params params_of(Rank& r, const Case& c, const std::vector<uint16_t>& products,
                                const std::vector<float>& weights, std::vector<uint16_t>& out) {
  const int block_rows = flux::moe::Layout::block_rows(c.max_tokens);
  return {r.symm,
          r.layout,
          {reinterpret_cast<const char*>(products.data()), kColumns * 2, r.positions.data(), weights.data(),
           c.top_k},
          kChunks,
          kBlockN,
          kColumns,
          block_rows,
          flux::moe::Layout::blocks_of(c.max_tokens, block_rows),
          r.incoming.data(),
          r.received.data(),
          r.sent.data(),
          out.data(),
          c.max_tokens,
          kCtas};
}

void combine(Rank& r, const CombiningRows::Params& params) {
  launch([&](void* shared) {
    const auto call = CombiningRows::begin(params);
    CombiningRows::combine<uint16_t>(params, call, r.num_tiles[0], shared);
    __syncthreads();
    if (threadIdx.x == 0) CombiningRows::end(params, call);
  });
}

// After a timeout a late peer may still read the buffer of an earlier call.
bool sends_nothing_after_a_timeout(const Case& c) {
  const std::vector<int32_t> ids = choose_experts(c);
  std::vector<Rank> ranks = ranks_of(c, ids);
  const std::vector<float> weights(ids.size(), 1.0f);
  Rank& r = ranks[0];
  r.symm.header()->aborted = 1;
  const std::vector<uint16_t> products(r.layout.max_rows() * kColumns, flux::gemm::to_bits(1.0f));
  std::vector<uint16_t> out(c.max_tokens * kColumns);
  const CombiningRows::Params params = params_of(r, c, products, weights, out);
  for (int chunk = 0; chunk < kChunks.count(); ++chunk) {
    for (int half = 0; half < 2 * r.num_tiles[0]; ++half) CombiningRows::stored(params, chunk);
  }
  combine(r, params);
  for (const char byte : ranks[1].buffer) {
    if (byte != 0) return std::printf("a rank sent after a timeout\n"), false;
  }
  return true;
}

bool run(const Case& c) {
  const std::vector<int32_t> ids = choose_experts(c);
  std::vector<Rank> ranks = ranks_of(c, ids);
  std::vector<float> weights(ids.size());
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = weight(i / c.top_k % c.max_tokens, i % c.top_k);
  return run_ranks(ranks, "sums", c, [&](int rank) {
    Rank& r = ranks[rank];
    const int p = c.world_size, k = c.top_k, share = r.layout.tp_size();
    std::vector<uint16_t> products(r.layout.max_rows() * kColumns), out(c.max_tokens * kColumns);
    const CombiningRows::Params params = params_of(r, c, products, weights, out);
    bool exact = true;
    for (int number = 0; number < kCalls; ++number) {
      // The GEMM: writes a chunk of columns, then says so.
      std::thread gemm([&] {
        for (int chunk = 0; chunk < kChunks.count(); ++chunk) {
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
      combine(r, params);
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
  return run_program(kThreads, kCtas, [] {
    return run({2, 1, 4, 2, 30}) && run({3, 3, 6, 5, 10}) && run({2, 1, 12, 9, 10}) &&
           sends_nothing_after_a_timeout({2, 1, 4, 2, 30});
  });
}
