// AllReduce and ReduceScatter by the device code of csrc/gemm_ar/all_reduce.cuh: CTAs of several ranks send each other
// vectors and sum them, also where the result is written over what is summed. Prints "all exact" if every rank has the
// sum of all.
#include "gemm_ar/all_reduce.cuh"

#include "launch.h"

namespace {

using flux::runtime::Exchange;

constexpr int kSummers = 32, kCtas = 2, kCalls = 4;

// Multiples of 2**rank below 2**(rank + 2): one that is missing or doubled shows.
float part(int call, int rank, int i) { return static_cast<float>((1 + (i / 8 + i + call) % 3) << rank); }

struct Summer {
  flux::runtime::SymmBuffer symm = {};
  flux::runtime::ErrorRecord error = {};
  std::vector<uint4> buffer;
};

bool run(int world_size, Exchange::Mode mode, int elements, bool in_place) {
  const bool scatters = mode == Exchange::Mode::kScatter;
  const Exchange exchange =
      scatters ? flux::runtime::make_exchange(world_size, elements / world_size, world_size, mode)
               : flux::runtime::make_exchange(1, elements, world_size, mode);
  std::vector<Summer> ranks(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    Summer& r = ranks[rank];
    r.symm.rank = rank;
    r.symm.world_size = world_size;
    r.symm.exchange_bytes = exchange.bytes();
    r.symm.error = &r.error;
    r.symm.timeout_ns = 60'000'000'000;
    r.buffer.resize((flux::runtime::kHeaderBytes + 2 * exchange.bytes()) / sizeof(uint4));
    for (size_t i = flux::runtime::kHeaderBytes / sizeof(uint4); i < r.buffer.size(); ++i) {
      r.buffer[i] = {~0u, ~0u, ~0u, ~0u};
    }
    for (Summer& other : ranks) other.symm.peers[rank] = reinterpret_cast<uint64_t>(r.buffer.data());
  }
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

}  // namespace

int main() {
  return run_program(kSummers + flux::gemm_ar::kClosingThreads, kCtas, [] {
    bool exact = true;
    for (const bool in_place : {false, true}) {
      // Fewer vectors than ranks, and several for each thread.
      for (const int vectors : {1, 2, 211}) {
        exact = exact && run(2, Exchange::Mode::kOneShot, 8 * vectors, in_place);
        exact = exact && run(3, Exchange::Mode::kTwoShot, 8 * vectors, in_place);
      }
    }
    return exact && run(5, Exchange::Mode::kOneShot, 8 * 70, false) &&  // more than are asked at a time
           run(3, Exchange::Mode::kScatter, 3 * 8 * 90, false);
  });
}
