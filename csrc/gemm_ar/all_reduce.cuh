// Kernels that sum a matrix over ranks: AllReduce, ReduceScatter, and GEMM+AllReduce in parts.
#pragma once

#include "gemm/finish.cuh"

namespace flux::gemm_ar {

// Large sums need many threads, small ones many SMs (docs/design/decode.md#what-made-the-sum-faster).
constexpr int kFewThreads = 352, kManyThreads = 704;
constexpr int kNormThreads = 512;      // two vectors of 8192 columns each
constexpr int kClosingThreads = 32;    // a warp that closes the call
constexpr int kNormMemory = 48 << 10;  // shared memory for a row and the norm's weight

struct SumParams {
  gemm::ExchangeParams exchange;
  const void* x;
  int row;  // elements of a row, after which `bias` repeats
};

// The sum of a matrix that is treated as one row of vectors, of which each rank sums all (one-shot) or a shard. Its own
// contribution is read in place: if x is also the result, the thread that overwrites a vector has read it.
template <class Element>
struct FlatSum {
  static constexpr int kVector = runtime::Exchange::kVector, kBytes = sizeof(uint4);

  const SumParams& params;
  const sync::Call call;
  const gemm::ExchangeParams& p = params.exchange;
  const uint4* const mine = static_cast<const uint4*>(params.x);
  const int rank = p.symm.rank;
  const int vectors = p.exchange.m * (p.exchange.n / kVector);
  const int shard = p.exchange.slot_rows() * (p.exchange.slot_columns() / kVector);
  const int64_t results = p.exchange.contribution_bytes();
  const int64_t slot_bytes = static_cast<int64_t>(shard) * kBytes;
  const bool one_shot = p.exchange.mode == runtime::Exchange::Mode::kOneShot;
  const bool two_shot = p.exchange.mode == runtime::Exchange::Mode::kTwoShot;
  const bool sends = !call.aborted;

  FLUX_DEVICE int shard_begin(int owner) const { return one_shot ? 0 : owner * shard; }
  FLUX_DEVICE int shard_size(int owner) const { return min(max(vectors - shard_begin(owner), 0), shard); }
  FLUX_DEVICE char* area(int peer) const { return p.symm.exchange(peer, call.epoch); }

  // Sends x to the ranks that sum it. for_each(owner, use) calls use(i) for the caller's vectors i of an owner's shard.
  template <class ForEach>
  FLUX_DEVICE void send(ForEach for_each) const {
    if (!sends) return;
    if (one_shot) {
      for_each(rank, [&](int i) {
        const uint4 v = exchange::presentable(mine[i]);
        exchange::for_each_peer(p.symm, [&](int peer) {
          ptx::store_relaxed_sys(area(peer) + rank * slot_bytes + static_cast<int64_t>(i) * kBytes, v);
        });
      });
      return;
    }
    exchange::for_each_peer(p.symm, [&](int peer) {
      char* const slot = area(peer) + rank * slot_bytes;
      const uint4* const part = mine + shard_begin(peer);
      for_each(peer, [&](int i) {
        ptx::store_relaxed_sys(slot + static_cast<int64_t>(i) * kBytes, exchange::presentable(part[i]));
      });
    });
  }

  // Sums a vector of this rank's shard; in two-shot mode also sends the sum to the peers.
  FLUX_DEVICE uint4 sum(int i) const {
    exchange::Parts<4> parts;
    uint4 bias, residual;
    char* const at = area(rank) + static_cast<int64_t>(i) * kBytes;
    const int in_matrix = shard_begin(rank) + i;
    const uint4* const own = mine + in_matrix;
    parts.ask(at, slot_bytes, p.exchange.world_size, 0, rank, own);
    if (p.finish.bias != nullptr) bias = *gemm::vector_at(p.finish.bias, in_matrix * kVector % params.row);
    if (p.finish.residual != nullptr) residual = static_cast<const uint4*>(p.finish.residual)[in_matrix];
    float total[kVector];
    parts.template take_sum<gemm::Pair<Element>>(p.symm, call, at, slot_bytes, p.op, 0, total, own);
    if (p.finish.bias != nullptr) gemm::add<Element>(bias, total);
    if (p.finish.residual != nullptr) gemm::add<Element>(residual, total);
    const uint4 v = gemm::round<Element>(total);
    if (two_shot && sends) {
      exchange::for_each_peer(p.symm, [&](int peer) {
        ptx::store_relaxed_sys(area(peer) + results + static_cast<int64_t>(in_matrix) * kBytes, v);
      });
    }
    return v;
  }

  // Two-shot: receives the sum of a vector of another rank's shard.
  FLUX_DEVICE uint4 result(int owner, int i) const {
    char* const at = area(rank) + results + static_cast<int64_t>(shard_begin(owner) + i) * kBytes;
    return exchange::take(p.symm, call, at, ptx::load_relaxed_sys(at),
                          {p.op, static_cast<uint32_t>(owner), 0});
  }
};

// Reads the epoch. The closing warp then closes the call, while the others sum. Every CTA sums the share of its number,
// and waits only for CTAs of peers with the same number: grids are equal, and CTAs begin in the order of their numbers
// (as CUB's scans rely on, too). So any number of resident CTAs is enough.
FLUX_DEVICE sync::Call begin_sum(const runtime::SymmBuffer& symm) {
  ptx::wait_for_earlier_kernels();
  const sync::Call call = sync::begin_call(symm);
  __syncthreads();  // all threads have read the epoch
  ptx::let_next_kernel_start();
  if (threadIdx.x == blockDim.x - kClosingThreads) sync::end_call(symm, call.epoch);
  return call;
}

template <class Element>
__global__ void __launch_bounds__(kManyThreads + kClosingThreads, 1)
    sum_over_ranks(const __grid_constant__ SumParams params) {
  const sync::Call call = begin_sum(params.exchange.symm);
  const int threads = blockDim.x - kClosingThreads, thread = threadIdx.x;
  if (thread >= threads) return;
  const FlatSum<Element> flat = {params, call};
  const auto for_each = [&](int owner, auto use) {
    const int count = flat.shard_size(owner);
#pragma unroll 1
    for (int i = blockIdx.x * threads + thread; i < count; i += gridDim.x * threads) use(i);
  };

  flat.send(for_each);
  auto* const out = static_cast<uint4*>(params.exchange.finish.out);
  const int begin = flat.two_shot ? flat.shard_begin(flat.rank) : 0;  // a scatter keeps only this rank's part
  for_each(flat.rank, [&](int i) { out[begin + i] = flat.sum(i); });
  if (!flat.two_shot) return;
  exchange::for_each_peer(params.exchange.symm, [&](int owner) {
    const int begin = flat.shard_begin(owner);
    for_each(owner, [&](int i) { out[begin + i] = flat.result(owner, i); });
  });
}

// sum_over_ranks with RMSNorm. Shards are whole rows. A CTA sends the rows that it later writes, before it does.
template <class Element>
__global__ void __launch_bounds__(kNormThreads + kClosingThreads, 1)
    sum_and_norm(const __grid_constant__ SumParams params) {
  constexpr int kThreads = kNormThreads;
  extern __shared__ uint4 row_memory[];
  const gemm::SpareMemory memory = {ptx::smem_addr(row_memory), kNormMemory};
  const sync::Call call = begin_sum(params.exchange.symm);
  const int thread = threadIdx.x;
  if (thread >= kThreads) return;
  const FlatSum<Element> flat = {params, call};
  const int row_vectors = params.row / flat.kVector;
  const auto for_each_row = [&](int owner, auto use, auto end_row) {
    const int count = flat.shard_size(owner) / row_vectors;
    for (int row = blockIdx.x; row < count; row += gridDim.x) {
#pragma unroll 1
      for (int i = thread; i < row_vectors; i += kThreads) use(row, i);
      end_row(row);
    }
  };
  flat.send([&](int owner, auto use) {
    for_each_row(owner, [&](int row, int i) { use(row * row_vectors + i); }, [](int) {});
  });

  const gemm::Finish& finish = params.exchange.finish;
  // A CTA without rows loads no norm weight: it would end before the copies.
  if (blockIdx.x >= flat.shard / row_vectors) {
    if (thread == 0 && finish.quantized.needs_all()) gemm::leave_part(finish.quantized, blockIdx.x, 0.0f);
    return;
  }
  gemm::RowNorm<Element, kThreads> norm = {finish, row_vectors, thread, memory};
  norm.begin();
  const auto normalise = [&](int owner, auto vector) {
    const int first = flat.shard_begin(owner) / row_vectors;
    for_each_row(
        owner, [&](int row, int i) { norm.take(first + row, i, vector(row * row_vectors + i)); },
        [&](int row) { norm.write(first + row); });
  };
  normalise(flat.rank, [&](int i) { return flat.sum(i); });
  if (flat.two_shot) {
    exchange::for_each_peer(params.exchange.symm, [&](int owner) {
      normalise(owner, [&](int i) { return flat.result(owner, i); });
    });
  }
  const int cta = blockIdx.x;
  norm.leave_largest({cta, cta + 1});
}

}  // namespace flux::gemm_ar
