// AllReduce and ReduceScatter by the device code of csrc/gemm_ar/all_reduce.cuh: CTAs of several ranks send each other
// vectors and sum them, also where the result, or its norm, is written over what is summed; and norms behind tiles by
// that of csrc/gemm/finish.cuh. Prints "all exact" if every rank has the sum of all.
#include "gemm_ar/all_reduce.cuh"

#include "launch.h"

namespace {

using flux::runtime::Exchange;

// Three calls: both buffers, and one of them again.
constexpr int kSummers = 32, kCtas = 2, kCalls = 3;
constexpr int kNormers = 128;  // threads that meet at a named barrier
constexpr int kScratch = 16 * flux::gemm::RowNorm<uint16_t, kNormers>::kScratchVectors;

// Multiples of 2**rank below 2**(rank + 2): one that is missing or doubled shows.
float part(int call, int rank, int i) { return static_cast<float>((1 + (i / 8 + i + call) % 3) << rank); }

struct Summer {
  flux::runtime::SymmBuffer symm = {};
  flux::runtime::ErrorRecord error = {};
  std::vector<uint4> buffer;
};

std::vector<Summer> make_ranks(const Exchange& exchange) {
  std::vector<Summer> ranks(exchange.world_size);
  for (int rank = 0; rank < exchange.world_size; ++rank) {
    Summer& r = ranks[rank];
    r.symm.rank = rank;
    r.symm.world_size = exchange.world_size;
    r.symm.exchange_bytes = exchange.bytes();
    r.symm.error = &r.error;
    r.symm.timeout_ns = 60'000'000'000;
    r.buffer.resize((flux::runtime::kHeaderBytes + 2 * exchange.bytes()) / sizeof(uint4));
    for (size_t i = flux::runtime::kHeaderBytes / sizeof(uint4); i < r.buffer.size(); ++i) {
      r.buffer[i] = {~0u, ~0u, ~0u, ~0u};
    }
    for (Summer& other : ranks) other.symm.peers[rank] = reinterpret_cast<uint64_t>(r.buffer.data());
  }
  return ranks;
}

bool run(int world_size, Exchange::Mode mode, int elements, bool in_place) {
  blockDim.x = kSummers + flux::gemm_ar::kClosingThreads;
  const bool scatters = mode == Exchange::Mode::kScatter;
  const Exchange exchange =
      scatters ? flux::runtime::make_exchange(world_size, elements / world_size, world_size, mode)
               : flux::runtime::make_exchange(1, elements, world_size, mode);
  std::vector<Summer> ranks = make_ranks(exchange);
  const bool exact = for_all_ranks(world_size, [&](int rank) {
    std::vector<uint4> x(elements / 8), result(elements / 8);
    uint4* const out = in_place ? x.data() : result.data();
    bool right = true;
    for (int call = 0; call < kCalls; ++call) {
      auto* const numbers = reinterpret_cast<uint16_t*>(x.data());
      for (int i = 0; i < elements; ++i) numbers[i] = flux::gemm::to_bits(part(call, rank, i));
      flux::gemm_ar::SumParams params = {{ranks[rank].symm, exchange, {}, 5}, x.data(), elements};
      params.exchange.finish.out = out;
      launch([&](void*) { flux::gemm_ar::sum_over_ranks<uint16_t>(params); });
      const int count = scatters ? elements / world_size : elements;
      for (int i = 0; i < count; ++i) {
        float sum = 0;
        for (int source = 0; source < world_size; ++source) {
          sum += part(call, source, scatters ? rank * count + i : i);
        }
        right &= reinterpret_cast<const uint16_t*>(out)[i] == flux::gemm::to_bits(sum);
      }
    }
    return right;
  });
  if (!exact)
    std::printf("wrong: %d ranks, mode %d, %d elements\n", world_size, static_cast<int>(mode), elements);
  return exact;
}

// What CTAs do that have computed a product: they send it, and then all sum, whoever has computed what.
void send_and_finish(const flux::gemm_ar::SumParams& params, const uint4* product,
                     const flux::gemm::SpareMemory& memory) {
  const auto& [symm, exchange, finish, op, rows_at_once] = params.exchange;
  const flux::sync::Call call = flux::gemm_ar::begin_sum(symm);
  const int thread = static_cast<int>(threadIdx.x), row_vectors = exchange.n / 8;
  const int share = static_cast<int>(blockIdx.x);
  if (thread >= kNormers) return;
  const int step = static_cast<int>(gridDim.x) * kNormers;
  for (int i = share * kNormers + thread; i < exchange.m * row_vectors; i += step) {
    flux::exchange::contribute(symm, exchange, call, i / row_vectors, i % row_vectors * 8, product[i]);
  }
  flux::gemm::finish<uint16_t, kNormers>(params.exchange, call, thread, {share, share + 1}, memory);
}

// Where norms are made: of whole rows in a launch of its own, over what is summed; or behind tiles.
enum class Launch { kOwn, kTiles };

// The norms of rows, with room for so many bytes of each row and of the norm's weight.
bool run_norm(Launch where, int world_size, Exchange::Mode mode, int rows, int columns, int room) {
  blockDim.x = kNormers + flux::gemm_ar::kClosingThreads;
  const bool own = where == Launch::kOwn;
  const Exchange exchange = own ? flux::runtime::make_row_exchange(rows, columns, world_size, mode)
                                : flux::runtime::make_exchange(rows, columns, world_size, mode);
  const int elements = rows * columns;
  std::vector<Summer> ranks = make_ranks(exchange);
  const bool exact = for_all_ranks(world_size, [&](int rank) {
    std::vector<uint4> x(elements / 8), norms(elements / 8), sums(elements / 8), weight(columns / 8);
    uint4* const out = own ? x.data() : norms.data();
    for (int i = 0; i < columns; ++i) {
      reinterpret_cast<uint16_t*>(weight.data())[i] = flux::gemm::to_bits(static_cast<float>(1 + i % 2));
    }
    bool right = true;
    for (int call = 0; call < kCalls; ++call) {
      auto* const numbers = reinterpret_cast<uint16_t*>(x.data());
      for (int i = 0; i < elements; ++i) numbers[i] = flux::gemm::to_bits(part(call, rank, i));
      flux::gemm_ar::SumParams params = {{ranks[rank].symm, exchange, {}, 5}, x.data(), columns};
      flux::gemm::Finish& finish = params.exchange.finish;
      finish.out = out;
      finish.sum_out = sums.data();
      finish.norm_weight = weight.data();
      launch([&](void* shared) {
        const flux::gemm::SpareMemory memory = {flux::ptx::smem_addr(shared), kScratch + room};
        if (own) {
          flux::gemm_ar::sum_and_norm_rows<uint16_t, kNormers>(params, memory);
        } else {
          send_and_finish(params, x.data(), memory);
        }
      });
      for (int row = 0; row < rows; ++row) {
        std::vector<float> wanted(columns);
        float squares = 0;
        for (int i = 0; i < columns; ++i) {
          for (int source = 0; source < world_size; ++source) {
            wanted[i] += part(call, source, row * columns + i);
          }
          squares += wanted[i] * wanted[i];
        }
        for (int i = 0; i < columns; ++i) {
          const int at = row * columns + i;
          right &= reinterpret_cast<const uint16_t*>(sums.data())[at] == flux::gemm::to_bits(wanted[i]);
          const float norm = wanted[i] / std::sqrt(squares / columns) * static_cast<float>(1 + i % 2);
          // Bits are cut off here, not rounded: less than one in 2^7.
          const float found = flux::gemm::from_bits(reinterpret_cast<const uint16_t*>(out)[at]);
          right &= std::abs(found - norm) <= norm / 120;
        }
      }
    }
    return right;
  });
  if (!exact) std::printf("wrong: %d ranks, mode %d, %d rows\n", world_size, static_cast<int>(mode), rows);
  return exact;
}

}  // namespace

int main() {
  return run_program(kSummers + flux::gemm_ar::kClosingThreads, kCtas, [] {
    bool exact = true;
    for (const bool in_place : {false, true}) {
      // Fewer vectors than ranks, and several for each thread.
      for (const int vectors : {1, 211}) {
        exact = exact && run(2, Exchange::Mode::kOneShot, 8 * vectors, in_place);
        exact = exact && run(3, Exchange::Mode::kTwoShot, 8 * vectors, in_place);
      }
    }
    exact = exact && run(5, Exchange::Mode::kOneShot, 8 * 70, false) &&  // more than are asked at a time
            run(3, Exchange::Mode::kScatter, 3 * 8 * 90, false);
    // Rows for all ranks alike and not, that fit into the memory with the weight, without it, and not at all.
    constexpr int kColumns = 8 * 150, kRowBytes = 2 * kColumns;
    for (const Launch where : {Launch::kOwn, Launch::kTiles}) {
      exact = exact && run_norm(where, 2, Exchange::Mode::kOneShot, 5, kColumns, 2 * kRowBytes) &&
              run_norm(where, 2, Exchange::Mode::kTwoShot, 5, kColumns, kRowBytes) &&
              run_norm(where, 3, Exchange::Mode::kTwoShot, 4, kColumns, 0);
    }
    return exact;
  });
}
