// Wrappers of PTX instructions, one a function. Shared-memory addresses are 32-bit (smem_addr).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "runtime/macros.h"

namespace flux::ptx {

FLUX_DEVICE uint32_t smem_addr(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
FLUX_DEVICE uint32_t lane() { return threadIdx.x & 31; }

// elect.sync, called by all lanes of a warp: true in one lane, not always the first. If lane numbers were compared, the
// compiler would emit a loop over threads for every TMA instruction.
FLUX_DEVICE bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n.reg .pred one;\n"
      "elect.sync _|one, 0xFFFFFFFF;\n"
      "selp.u32 %0, 1, 0, one;\n}"
      : "=r"(elected));
  return elected != 0;
}
// Index of the warp in the CTA, in a form that the compiler knows to be uniform in a warp.
FLUX_DEVICE int warp() { return __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x / 32), 0); }
FLUX_DEVICE uint32_t cluster_cta_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
FLUX_DEVICE uint32_t cluster_num_ctas() {
  uint32_t count;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
  return count;
}
FLUX_DEVICE uint64_t globaltimer_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
template <int kRegisters>
FLUX_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
FLUX_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- barriers ---

FLUX_DEVICE void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// bar.arrive: counts as one of those threads, without waiting for the others.
FLUX_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// bar.red.and: true in every participating thread iff `condition` holds in all of them.
FLUX_DEVICE bool named_barrier_and(int id, int threads, bool condition) {
  uint32_t all;
  asm volatile(
      "{\n.reg .pred one, every;\n"
      "setp.ne.u32 one, %3, 0;\n"
      "bar.red.and.pred every, %1, %2, one;\n"
      "selp.u32 %0, 1, 0, every;\n}"
      : "=r"(all)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(condition))
      : "memory");
  return all != 0;
}

// Does not order memory, which would wait for all accesses in flight; after fence_mbarrier_init enough for mbarriers.
FLUX_DEVICE void cluster_sync_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}
FLUX_DEVICE void mbarrier_init(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
FLUX_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
FLUX_DEVICE void mbarrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// mapa: the address, in the shared memory of the cluster, of what has this address in one of its CTAs.
FLUX_DEVICE uint32_t address_in(uint32_t cta, uint32_t address) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(cta));
  return remote;
}
// Arrives on an mbarrier of a CTA of the cluster, to release memory that this thread has read. Release at CTA scope
// (the default) is enough: only TMA loads and st.async that depend on the arrival overwrite it.
FLUX_DEVICE void mbarrier_arrive_cluster(uint32_t bar, uint32_t cta) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(cta, bar)) : "memory");
}
FLUX_DEVICE void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
FLUX_DEVICE void mbarrier_arrive_expect_tx_cluster(uint32_t bar, uint32_t bytes, uint32_t cta) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(address_in(cta, bar)),
               "r"(bytes)
               : "memory");
}
// st.async: stores a word to shared memory of a CTA of the cluster; completes 4 bytes on that CTA's mbarrier.
FLUX_DEVICE void store_async_cluster(uint32_t address, uint32_t value, uint32_t bar, uint32_t cta) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                   address_in(cta, address)),
               "r"(value), "r"(address_in(cta, bar))
               : "memory");
}

// Whether the phase is complete, without waiting. Returns the same value in all lanes of a warp.
FLUX_DEVICE bool mbarrier_test(uint32_t bar, uint32_t phase) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(bar), "r"(phase)
      : "memory");
  return __all_sync(~0u, done != 0);
}
FLUX_DEVICE void mbarrier_wait(uint32_t bar, uint32_t phase) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n}" ::"r"(bar),
      "r"(phase)
      : "memory");
}

// --- TMA and bulk copies ---

FLUX_DEVICE void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
FLUX_DEVICE void tma_load_2d(const CUtensorMap* map, uint32_t dst, uint32_t bar, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
      "[%2];" ::"r"(dst),
      "l"(map), "r"(bar), "r"(x), "r"(y)
      : "memory");
}
FLUX_DEVICE void tma_load_3d(const CUtensorMap* map, uint32_t dst, uint32_t bar, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(dst),
      "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Multicast: writes to the same shared-memory offset in every CTA of `cta_mask`, and completes on each CTA's mbarrier.
FLUX_DEVICE void tma_load_2d_multicast(const CUtensorMap* map, uint32_t dst, uint32_t bar, int x, int y,
                                       uint16_t cta_mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5}], [%2], %3;" ::"r"(dst),
      "l"(map), "r"(bar), "h"(cta_mask), "r"(x), "r"(y)
      : "memory");
}
FLUX_DEVICE void tma_store_3d(const CUtensorMap* map, uint32_t src, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(src), "r"(x), "r"(y), "r"(z)
               : "memory");
}

// As tma_store_3d, but adds fp32 elements to those in memory.
FLUX_DEVICE void tma_add_3d(const CUtensorMap* map, uint32_t src, int x, int y, int z) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          map),
      "r"(src), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Fetches a box to the L2. Nothing waits for it.
FLUX_DEVICE void tma_prefetch_3d(const CUtensorMap* map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map), "r"(x),
               "r"(y), "r"(z)
               : "memory");
}

// cp.async of 16 bytes, or zeros if not `valid`. Of the next commit group, and of mbarrier_arrive_after_copies.
FLUX_DEVICE void copy_async_16(uint32_t dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "r"(valid ? 16 : 0)
               : "memory");
}
FLUX_DEVICE void copy_async_4(uint32_t dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}
// Arrives on the mbarrier when all earlier cp.async copies of this thread are complete.
FLUX_DEVICE void mbarrier_arrive_after_copies(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
FLUX_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but this thread's newest kPending commit groups are complete and visible to this thread.
template <int kPending>
FLUX_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Bulk copy of contiguous bytes (a multiple of 16) from shared memory to global memory, also to a peer.
FLUX_DEVICE void bulk_store(void* dst, uint32_t src, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes)
               : "memory");
}
FLUX_DEVICE void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(bar)
      : "memory");
}

// Bulk copy from this CTA's shared memory to that of a CTA of the cluster; completes on that CTA's mbarrier.
FLUX_DEVICE void bulk_copy_cluster(uint32_t dst, uint32_t src, uint32_t bytes, uint32_t bar, uint32_t cta) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          address_in(cta, dst)),
      "r"(src), "r"(bytes), "r"(address_in(cta, bar))
      : "memory");
}

// Fetches the line of an address to the L2. Nothing waits for it.
FLUX_DEVICE void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}
constexpr int kLineBytes = 128;

FLUX_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but the newest kPending bulk groups have read their sources; not for the writes.
template <int kPending>
FLUX_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until all bulk groups are complete: their writes are visible to this thread.
FLUX_DEVICE void bulk_wait_complete() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// --- memory order ---

// Makes earlier ordinary stores to shared memory visible to later TMA stores and bulk copies.
FLUX_DEVICE void fence_proxy_async_smem() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Orders ordinary accesses and bulk copies of global memory, in both directions.
FLUX_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
FLUX_DEVICE void store_release_sys(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
FLUX_DEVICE void add_release_sys(uint32_t* address, uint32_t value) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
FLUX_DEVICE uint32_t load_acquire_sys(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
FLUX_DEVICE uint32_t load_relaxed(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Vectors that ranks exchange without a signal. System scope: no stale cache line is used. Each 32-bit word is atomic.
FLUX_DEVICE void store_relaxed_sys(void* address, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
FLUX_DEVICE uint4 load_relaxed_sys(const void* address) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

// --- programmatic dependent launch ---

// Waits until all writes of the stream's earlier kernels are visible. Returns immediately in an ordinary launch.
FLUX_DEVICE void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the stream's next kernel start, if it may, and run up to wait_for_earlier_kernels.
FLUX_DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// --- shared memory from registers ---

FLUX_DEVICE void store_shared_v4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
// As floats: cast to integers, they would be integers in the mainloop, and wgmma would wait for the casts.
FLUX_DEVICE void store_shared_v4(uint32_t address, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}
FLUX_DEVICE void store_shared_pair(uint32_t address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}
FLUX_DEVICE void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
FLUX_DEVICE uint32_t load_shared(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
FLUX_DEVICE float2 load_shared_pair(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}
FLUX_DEVICE uint4 load_shared_v4(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
FLUX_DEVICE float4 load_shared_floats(uint32_t address) {
  const uint4 v = load_shared_v4(address);
  return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
}

// stmatrix of four 8x8 matrices of 16 bits, in the register layout of wgmma's accumulators; lanes supply the rows.
FLUX_DEVICE void stmatrix_x4(uint32_t row_address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}
// stmatrix of two 8x8 matrices, transposed; lanes 0 to 15 supply the row addresses.
FLUX_DEVICE void stmatrix_x2_transposed(uint32_t row_address, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row_address), "r"(a),
               "r"(b)
               : "memory");
}

// --- fp8 ---

// Rounds four values to nearest even, those beyond the type's largest to that; NaN becomes 0x7F. `a` is the lowest byte.
#define FLUX_ROUND_TO(type)                                            \
  FLUX_DEVICE uint32_t to_##type(float a, float b, float c, float d) { \
    uint32_t bytes;                                                    \
    asm("{\n.reg .b16 low, high;\n"                                    \
        "cvt.rn.satfinite." #type                                      \
        "x2.f32 low, %2, %1;\n"                                        \
        "cvt.rn.satfinite." #type                                      \
        "x2.f32 high, %4, %3;\n"                                       \
        "mov.b32 %0, {low, high};\n}"                                  \
        : "=r"(bytes)                                                  \
        : "f"(a), "f"(b), "f"(c), "f"(d));                             \
    return bytes;                                                      \
  }
FLUX_ROUND_TO(e4m3)
FLUX_ROUND_TO(e5m2)
#undef FLUX_ROUND_TO

}  // namespace flux::ptx
