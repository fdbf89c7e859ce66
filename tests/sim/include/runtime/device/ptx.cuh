// Stands in for csrc/runtime/device/ptx.cuh: the same functions, with the engine's instructions. The last argument
// is the line of the caller, for reports.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "sim.h"

namespace flux::ptx {

// What the engine has by these names.
using sim::bulk_commit, sim::bulk_copy_cluster, sim::bulk_load, sim::bulk_store, sim::cluster_cta_rank,
    sim::cluster_num_ctas, sim::cluster_sync_relaxed, sim::copy_async_commit, sim::elect_one,
    sim::fence_mbarrier_init, sim::fence_proxy_async, sim::globaltimer_ns, sim::let_next_kernel_start,
    sim::mbarrier_arrive_after_copies, sim::mbarrier_arrive_expect_tx_cluster, sim::mbarrier_init,
    sim::mbarrier_wait, sim::named_barrier_and, sim::prefetch_line, sim::store_async_cluster,
    sim::add_release_sys, sim::store_release_sys, sim::tma_add_3d, sim::tma_store_3d,
    sim::wait_for_earlier_kernels;

inline uint32_t smem_addr(const void* pointer) { return sim::shared_address(pointer); }
inline uint32_t lane() { return threadIdx.x & 31; }
inline int warp(FLUX_SIM_HERE) {
  return __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x / 32), 0, 32, where);
}
template <int kRegisters>
void setmaxnreg_dec(FLUX_SIM_HERE) {
  sim::set_registers(kRegisters, /*grows=*/false, where);
}
template <int kRegisters>
void setmaxnreg_inc(FLUX_SIM_HERE) {
  sim::set_registers(kRegisters, /*grows=*/true, where);
}

// --- barriers ---

inline void named_barrier_sync(int id, int threads, FLUX_SIM_HERE) {
  sim::cta_barrier(id, threads, /*waits=*/true, where);
}
inline void named_barrier_arrive(int id, int threads, FLUX_SIM_HERE) {
  sim::cta_barrier(id, threads, /*waits=*/false, where);
}
inline void mbarrier_arrive_cluster(uint32_t bar, int cta, FLUX_SIM_HERE) {
  mbarrier_arrive_expect_tx_cluster(bar, 0, cta, where);
}
inline void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes, FLUX_SIM_HERE) {
  mbarrier_arrive_expect_tx_cluster(bar, bytes, sim::kThisCta, where);
}
inline void mbarrier_arrive(uint32_t bar, FLUX_SIM_HERE) { mbarrier_arrive_expect_tx(bar, 0, where); }
inline bool mbarrier_test(uint32_t bar, uint32_t phase, FLUX_SIM_HERE) {
  return __all_sync(~0u, sim::mbarrier_test(bar, phase, where), where);
}

// --- TMA and bulk copies ---

inline void prefetch_tensor_map(const CUtensorMap*) {}
inline void tma_load_2d(const CUtensorMap* map, uint32_t dst, uint32_t bar, int x, int y, FLUX_SIM_HERE) {
  sim::tma_load(map, dst, bar, {x, y}, 0, where);
}
inline void tma_load_3d(const CUtensorMap* map, uint32_t dst, uint32_t bar, int x, int y, int z,
                        FLUX_SIM_HERE) {
  sim::tma_load(map, dst, bar, {x, y, z}, 0, where);
}
inline void tma_load_2d_multicast(const CUtensorMap* map, uint32_t dst, uint32_t bar, int x, int y,
                                  uint16_t cta_mask, FLUX_SIM_HERE) {
  sim::tma_load(map, dst, bar, {x, y}, cta_mask, where);
}
inline void tma_prefetch_3d(const CUtensorMap*, int, int, int) {}
inline void copy_async_16(uint32_t dst, const void* src, bool valid, FLUX_SIM_HERE) {
  sim::copy_async(dst, src, 16, valid, where);
}
inline void copy_async_4(uint32_t dst, const void* src, FLUX_SIM_HERE) {
  sim::copy_async(dst, src, 4, /*valid=*/true, where);
}
template <int kPending>
void copy_async_wait(FLUX_SIM_HERE) {
  sim::copy_async_wait(kPending, where);
}
constexpr int kLineBytes = 128;
template <int kPending>
void bulk_wait_read(FLUX_SIM_HERE) {
  sim::bulk_wait(kPending, /*reads_only=*/true, where);
}
inline void bulk_wait_complete(FLUX_SIM_HERE) { sim::bulk_wait(0, /*reads_only=*/false, where); }

// --- memory order ---

inline void fence_proxy_async_smem() { sim::fence_proxy_async(); }
inline uint32_t load_acquire_sys(const uint32_t* address, FLUX_SIM_HERE) {
  uint32_t value;
  sim::poll(address, &value, sizeof(value), sim::Scope::kSystem, /*acquires=*/true, where);
  return value;
}
inline uint32_t load_relaxed(const uint32_t* address, FLUX_SIM_HERE) {
  uint32_t value;
  sim::poll(address, &value, sizeof(value), sim::Scope::kDevice, /*acquires=*/false, where);
  return value;
}
inline void store_relaxed_sys(void* address, uint4 v, FLUX_SIM_HERE) {
  sim::store_relaxed(address, &v, 4, where);
}
inline uint4 load_relaxed_sys(const void* address, FLUX_SIM_HERE) {
  uint4 v;
  sim::poll(address, &v, sizeof(v), sim::Scope::kSystem, /*acquires=*/false, where);
  return v;
}

// --- shared memory from registers ---

inline void store_shared_v4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d, FLUX_SIM_HERE) {
  const uint32_t words[4] = {a, b, c, d};
  sim::store_shared(address, words, sizeof(words), where);
}
inline void store_shared_v4(uint32_t address, float a, float b, float c, float d, FLUX_SIM_HERE) {
  const float words[4] = {a, b, c, d};
  sim::store_shared(address, words, sizeof(words), where);
}
inline void store_shared_pair(uint32_t address, float a, float b, FLUX_SIM_HERE) {
  const float words[2] = {a, b};
  sim::store_shared(address, words, sizeof(words), where);
}
inline void store_shared(uint32_t address, uint32_t value, FLUX_SIM_HERE) {
  sim::store_shared(address, &value, sizeof(value), where);
}
template <class T>
T loaded(uint32_t address, const sim::Where& where) {
  T value;
  sim::load_shared(address, &value, sizeof(value), where);
  return value;
}
inline uint32_t load_shared(uint32_t address, FLUX_SIM_HERE) { return loaded<uint32_t>(address, where); }
inline float2 load_shared_pair(uint32_t address, FLUX_SIM_HERE) { return loaded<float2>(address, where); }
inline uint4 load_shared_v4(uint32_t address, FLUX_SIM_HERE) { return loaded<uint4>(address, where); }
inline float4 load_shared_floats(uint32_t address, FLUX_SIM_HERE) { return loaded<float4>(address, where); }
inline void stmatrix_x4(uint32_t row_address, uint32_t a, uint32_t b, uint32_t c, uint32_t d, FLUX_SIM_HERE) {
  const uint32_t fragments[4] = {a, b, c, d};
  sim::store_matrices(row_address, fragments, 4, /*transposed=*/false, where);
}
inline void stmatrix_x2_transposed(uint32_t row_address, uint32_t a, uint32_t b, FLUX_SIM_HERE) {
  const uint32_t fragments[2] = {a, b};
  sim::store_matrices(row_address, fragments, 2, /*transposed=*/true, where);
}

// --- fp8 ---

inline uint32_t to_e4m3(float a, float b, float c, float d) { return sim::to_fp8(a, b, c, d, false); }
inline uint32_t to_e5m2(float a, float b, float c, float d) { return sim::to_fp8(a, b, c, d, true); }

}  // namespace flux::ptx
