// Sums a matrix that every rank has: AllReduce and ReduceScatter, and what follows the GEMM where GEMM+AllReduce takes
// two launches.
#pragma once

#include "gemm/finish.cuh"

namespace flux::gemm_ar {

// Each thread has one vector under way at a time, so that large sums need many of them, and small ones many SMs. Of 704
// instead of 352, sums of 1.5, 3 and 6 MiB of two GPUs take 7.8, 12.7 and 22.5 us and not 8.0, 13.3 and 24.6, and one of
// 24 KiB 3.2 and not 2.9 (benchmarks/results/tuning/2026-11-22-all_reduce-threads-tp2-2xH200.json).
constexpr int kFewThreads = 352, kManyThreads = 704;
constexpr int kNormThreads = 224;
constexpr int kClosingThreads = 32;  // a warp that closes the call

struct SumParams {
  gemm::ExchangeParams exchange;
  const void* x;
  int row;  // elements of a row, with which `bias` repeats
};

// A user's NaN may look like a vector that has not arrived; there are others.
FLUX_DEVICE uint4 presentable(uint4 v) {
  for (uint32_t* word : {&v.x, &v.y, &v.z, &v.w}) {
    if (*word == runtime::kAbsent) *word = 0x7FFF7FFF;
  }
  return v;
}

// As one row of vectors, of which each rank sums all (one-shot) or a shard. This rank's own part is read where it lies,
// and where x is also the result, by the thread that then writes there.
template <class Element>
__global__ void __launch_bounds__(kManyThreads + kClosingThreads, 1)
    sum_over_ranks(const __grid_constant__ SumParams params) {
  constexpr int kVector = runtime::Exchange::kVector, kBytes = sizeof(uint4);
  const gemm::ExchangeParams& p = params.exchange;
  const runtime::Exchange& x = p.exchange;
  ptx::wait_for_earlier_kernels();
  const sync::Call call = sync::begin_call(p.symm);
  __syncthreads();  // all threads know the call
  ptx::let_next_kernel_start();
  const int threads = blockDim.x - kClosingThreads, thread = threadIdx.x;
  if (thread >= threads) {
    if (thread == threads) sync::end_call(p.symm, call.epoch);
    return;
  }
  const int first = blockIdx.x * threads + thread, step = gridDim.x * threads;
  const int rank = p.symm.rank, vectors = x.m * (x.n / kVector);
  const int64_t results = x.contribution_bytes(), slot_bytes = results / x.world_size;
  const int shard = static_cast<int>(slot_bytes / kBytes);
  const bool one_shot = x.mode == runtime::Exchange::Mode::kOneShot;
  const bool two_shot = x.mode == runtime::Exchange::Mode::kTwoShot;
  const auto shard_begin = [&](int owner) { return one_shot ? 0 : owner * shard; };
  const auto shard_size = [&](int owner) { return min(max(vectors - shard_begin(owner), 0), shard); };
  const auto area = [&](int peer) { return p.symm.exchange(peer, call.epoch); };
  const auto* const mine = static_cast<const uint4*>(params.x);
  auto* const out = static_cast<uint4*>(p.finish.out);
  // Behind a call that ran out of time nothing is sent: a late peer may not have read what lies there.
  const bool sends = !call.aborted;

  if (one_shot && sends) {
#pragma unroll 1
    for (int i = first; i < vectors; i += step) {
      const uint4 v = presentable(mine[i]);
      exchange::for_each_peer(p.symm, [&](int peer) {
        ptx::store_relaxed_sys(area(peer) + rank * slot_bytes + static_cast<int64_t>(i) * kBytes, v);
      });
    }
  } else if (sends) {
    exchange::for_each_peer(p.symm, [&](int peer) {
      char* const slot = area(peer) + rank * slot_bytes;
      const uint4* const part = mine + shard_begin(peer);
      const int count = shard_size(peer);
#pragma unroll 1
      for (int i = first; i < count; i += step) {
        ptx::store_relaxed_sys(slot + static_cast<int64_t>(i) * kBytes, presentable(part[i]));
      }
    });
  }

  const int begin = shard_begin(rank), count = shard_size(rank);
#pragma unroll 1
  for (int i = first; i < count; i += step) {
    exchange::Parts<4> parts;
    uint4 bias, residual;
    char* const at = area(rank) + static_cast<int64_t>(i) * kBytes;
    const uint4* const own = mine + begin + i;
    parts.ask(at, slot_bytes, x.world_size, 0, rank, own);
    if (p.finish.bias != nullptr) bias = *gemm::vector_at(p.finish.bias, (begin + i) * kVector % params.row);
    if (p.finish.residual != nullptr) residual = static_cast<const uint4*>(p.finish.residual)[begin + i];
    float total[kVector];
    parts.template take_sum<gemm::Pair<Element>>(p.symm, call, at, slot_bytes, p.op, 0, total, own);
    if (p.finish.bias != nullptr) gemm::add<Element>(bias, total);
    if (p.finish.residual != nullptr) gemm::add<Element>(residual, total);
    const uint4 v = gemm::round<Element>(total);
    if (two_shot && sends) {
      exchange::for_each_peer(p.symm, [&](int peer) {
        ptx::store_relaxed_sys(area(peer) + results + static_cast<int64_t>(begin + i) * kBytes, v);
      });
    }
    out[two_shot ? begin + i : i] = v;  // a scatter's result has only this rank's part
  }
  if (!two_shot) return;
  exchange::for_each_peer(p.symm, [&](int owner) {
    const int theirs = shard_begin(owner), count = shard_size(owner);
#pragma unroll 1
    for (int i = first; i < count; i += step) {
      char* const at = area(rank) + results + static_cast<int64_t>(theirs + i) * kBytes;
      out[theirs + i] = exchange::take(p.symm, call, at, ptx::load_relaxed_sys(at),
                                       {p.op, static_cast<uint32_t>(owner), 0});
    }
  });
}

// The same with RMSNorm, row by row.
template <class Element>
__global__ void __launch_bounds__(kNormThreads + kClosingThreads, 2)
    sum_and_norm(const __grid_constant__ SumParams params) {
  constexpr int kVector = runtime::Exchange::kVector;
  const gemm::ExchangeParams& p = params.exchange;
  ptx::wait_for_earlier_kernels();
  const sync::Call call = sync::begin_call(p.symm);
  __syncthreads();  // all threads know the call
  ptx::let_next_kernel_start();
  if (threadIdx.x >= kNormThreads) {
    if (threadIdx.x == kNormThreads) sync::end_call(p.symm, call.epoch);
    return;
  }
  const int row_vectors = p.exchange.n / kVector;
  const int first = blockIdx.x * kNormThreads + threadIdx.x, step = gridDim.x * kNormThreads;
  for (int i = first; i < p.exchange.m * row_vectors; i += step) {
    const uint4 v = presentable(*gemm::vector_at(params.x, static_cast<int64_t>(i) * kVector));
    exchange::contribute(p.symm, p.exchange, call, i / row_vectors, i % row_vectors * kVector, v);
  }
  gemm::finish<Element, kNormThreads>(p, call, threadIdx.x);
}

}  // namespace flux::gemm_ar
