// What device code compiled for the host asks of the engine: one function for each instruction that has more effect
// than plain C++. Engine files implement them; the headers beside this one call them, or pass them on.
#pragma once

#include <cstdint>
#include <functional>
#include <source_location>
#include <string>

namespace sim {

using Where = std::source_location;
constexpr Where kNowhere{};
// The last argument of what device code calls: the caller's line, for reports.
#define FLUX_SIM_HERE const sim::Where& where = sim::Where::current()

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

// --- collectives ---
void cta_barrier(int id, int threads, bool waits, const Where& where);  // threads 0: all that have not exited
bool named_barrier_and(int id, int threads, bool condition, FLUX_SIM_HERE);
void cluster_sync_relaxed(FLUX_SIM_HERE);
void grid_barrier(const Where& where);  // of a cooperative launch
// All lanes of a warp exchange a word: values[lane] afterwards, for lanes of `mask`.
// `orders`: also their accesses of memory, as only __syncwarp does.
void warp_exchange(uint32_t mask, uint64_t value, uint64_t (&values)[32], const Where& where,
                   bool orders = false);
bool elect_one(FLUX_SIM_HERE);
uint32_t cluster_cta_rank();
uint32_t cluster_num_ctas();
void set_registers(int count, bool grows, const Where& where);

// --- shared memory: 32-bit addresses of the running CTA ---
uint32_t shared_address(const void* pointer);
void* shared_pointer(uint32_t address);
void store_shared(uint32_t address, const void* bytes, int count, const Where& where);
void load_shared(uint32_t address, void* bytes, int count, const Where& where);
// The calling warp's lanes together: `matrices` 8x8 matrices, lane l supplies the address of row l.
void store_matrices(uint32_t row_address, const uint32_t* fragments, int matrices, bool transposed,
                    const Where& where);

// --- mbarriers ---
constexpr int kThisCta = -1;
void fence_mbarrier_init();
void mbarrier_init(uint32_t bar, uint32_t count, FLUX_SIM_HERE);
void mbarrier_arrive_expect_tx_cluster(uint32_t bar, uint32_t bytes, int cta, FLUX_SIM_HERE);
bool mbarrier_test(uint32_t bar, uint32_t parity, const Where& where);
void mbarrier_wait(uint32_t bar, uint32_t parity, FLUX_SIM_HERE);
void mbarrier_arrive_after_copies(uint32_t bar, FLUX_SIM_HERE);

// --- asynchronous operations ---
// at: two or three coordinates.
void tma_load(const void* map, uint32_t dst, uint32_t bar, std::initializer_list<int> at, uint32_t ctas,
              const Where& where);
void tma_store_3d(const void* map, uint32_t src, int x, int y, int z, FLUX_SIM_HERE);
void tma_add_3d(const void* map, uint32_t src, int x, int y, int z, FLUX_SIM_HERE);
void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar, FLUX_SIM_HERE);
void bulk_store(void* dst, uint32_t src, uint32_t bytes, FLUX_SIM_HERE);
void bulk_copy_cluster(uint32_t dst, uint32_t src, uint32_t bytes, uint32_t bar, int cta, FLUX_SIM_HERE);
void prefetch_line(const void* address, FLUX_SIM_HERE);
void bulk_commit();
void bulk_wait(int pending, bool reads_only, const Where& where);
void store_async_cluster(uint32_t address, uint32_t value, uint32_t bar, int cta, FLUX_SIM_HERE);
void copy_async(uint32_t dst, const void* src, int bytes, bool valid, const Where& where);
void copy_async_commit();
void copy_async_wait(int pending, const Where& where);
void fence_proxy_async();

// --- wgmma ---
enum class Element { kBFloat16, kFloat16, kE4M3, kE5M2 };
struct WgmmaShape {
  int n;
  Element a, b;
  bool a_mn_major, b_mn_major;
};
void wgmma_fence();
void wgmma(const WgmmaShape& shape, uint64_t a, uint64_t b, float* accumulators, bool accumulate);
void wgmma_commit();
void wgmma_wait(int pending);

// --- fp8 ---
uint32_t to_fp8(float a, float b, float c, float d, bool e5m2);  // a is the lowest byte

// --- global memory and time ---
// Among whom an access orders others.
enum class Scope { kDevice, kSystem };
void store_release_sys(uint32_t* address, uint32_t value, FLUX_SIM_HERE);  // of the system, both
void add_release_sys(uint32_t* address, uint32_t value, FLUX_SIM_HERE);
// Loads that a program may spin on. Two loads of the same value make the thread wait until something changes.
void poll(const void* address, void* bytes, int count, Scope scope, bool acquires, const Where& where);
void store_relaxed(void* address, const void* bytes, int words, const Where& where);
void memory_fence();
// Relaxed, of the device.
uint32_t atomic(uint32_t* address, const std::function<uint32_t(uint32_t)>& change, const Where& where);
uint64_t globaltimer_ns();
int64_t clock_cycles();

void wait_for_earlier_kernels(FLUX_SIM_HERE);
void let_next_kernel_start();

// --- host ---
struct LaunchConfig {
  Dim grid, block;
  int cluster = 1;
  size_t shared_bytes = 0;
  bool early_start = false;
  bool cooperative = false;
  void* stream = nullptr;
};
// False: a cooperative launch of more CTAs than the device holds.
bool launch(const void* kernel, const LaunchConfig& config, std::function<void()> body);

}  // namespace sim

// The running thread's coordinates, set at every switch.
extern sim::Dim threadIdx, blockIdx, blockDim, gridDim;
