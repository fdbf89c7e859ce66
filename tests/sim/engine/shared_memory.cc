// Shared memory of CTAs. Variables that kernels declare __shared__ are thread-local variables of this program, all of
// which lie in one block of pages. A switch to another CTA maps that CTA's pages over the block.
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "machine.h"

// The arrays that kernels declare as dynamic shared memory, all at one address, which is aligned to 16 bytes and no
// more. The array is as large as its pages, so that the C library puts no variable of its own behind it.
extern "C" {
alignas(4096) thread_local uint8_t sim_dynamic_shared[233472];
}
#define FLUX_SIM_SAME_ADDRESS(symbol) \
  asm(".globl " #symbol "\n.type " #symbol ", @object\n.set " #symbol ", sim_dynamic_shared + 16\n")
FLUX_SIM_SAME_ADDRESS(_ZN4flux4gemm8raw_smemE);
FLUX_SIM_SAME_ADDRESS(_ZN4flux3moe8raw_smemE);
FLUX_SIM_SAME_ADDRESS(_ZN4flux3moe12_GLOBAL__N_14smemE);
FLUX_SIM_SAME_ADDRESS(_ZN4flux7gemm_ar10row_memoryE);
FLUX_SIM_SAME_ADDRESS(_ZN4flux4gemm10row_memoryE);

namespace sim {
namespace {

constexpr uint32_t kPage = 4096;
constexpr int kMaxSlots = 512;
uint8_t* block_begin = nullptr;
int file = -1;
uint8_t* slots = nullptr;
std::vector<int> free_slots;

void find_block() {
  size_t bytes = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* result) {
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          if (info->dlpi_phdr[i].p_type == PT_TLS) *static_cast<size_t*>(result) = info->dlpi_phdr[i].p_memsz;
        }
        return 1;  // the program comes first
      },
      &bytes);
  uint8_t* const end = sim_dynamic_shared + sizeof(sim_dynamic_shared);
  uint8_t* thread_pointer;
  asm("mov %%fs:0, %0" : "=r"(thread_pointer));
  block_begin = end - bytes;
  if (end != thread_pointer || bytes % kPage != 0 || bytes > kSharedBytes) {
    std::fprintf(stderr, "sim: unexpected thread-local block: %zu bytes\n", bytes);
    std::abort();
  }
  file = memfd_create("shared", 0);
  if (file < 0 || ftruncate(file, static_cast<off_t>(kMaxSlots) * kSharedBytes) != 0) std::abort();
  void* const all = mmap(nullptr, static_cast<size_t>(kMaxSlots) * kSharedBytes, PROT_READ | PROT_WRITE,
                         MAP_SHARED, file, 0);
  if (all == MAP_FAILED) std::abort();
  slots = static_cast<uint8_t*>(all);
  for (int slot = kMaxSlots - 1; slot >= 0; --slot) free_slots.push_back(slot);
}

}  // namespace

uint8_t* slot_memory(int slot) { return slots + static_cast<size_t>(slot) * kSharedBytes; }

int take_slot() {
  if (block_begin == nullptr) find_block();
  if (free_slots.empty()) std::abort();
  const int slot = free_slots.back();
  free_slots.pop_back();
  return slot;
}

void free_slot(int slot) { free_slots.push_back(slot); }

void map_shared_memory(const Cta& cta) {
  const auto bytes = static_cast<size_t>(sim_dynamic_shared + sizeof(sim_dynamic_shared) - block_begin);
  void* const at = mmap(block_begin, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file,
                        static_cast<off_t>(cta.slot) * kSharedBytes);
  if (at != block_begin) std::abort();
}

uint32_t dynamic_begin() { return static_cast<uint32_t>(sim_dynamic_shared + 16 - block_begin); }

uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - block_begin);
}

bool is_shared(const void* pointer) {
  const auto bytes = static_cast<uintptr_t>(sim_dynamic_shared + sizeof(sim_dynamic_shared) - block_begin);
  return reinterpret_cast<uintptr_t>(pointer) - reinterpret_cast<uintptr_t>(block_begin) < bytes;
}

void* shared_pointer(uint32_t address) { return block_begin + address; }

uint8_t* checked(Cta& cta, uint32_t address, int64_t bytes, const char* what, const Where& where) {
  const auto end = static_cast<int64_t>(dynamic_begin() + cta.launch->config.shared_bytes);
  if (cta.exited) fail(where, what, " of a CTA that has exited");
  if (address + bytes > end)
    fail(where, what, " beyond the CTA's shared memory: ", address, " + ", bytes, " > ", end);
  return cta.memory + address;
}

static Access plain(const char* what, const Where& where) {
  const Clock& clock = self().clock;
  return {what, Epoch::of(clock.actor, clock.thread, clock.now), place_of(where), clock, &clock};
}

void store_shared(uint32_t address, const void* bytes, int count, const Where& where) {
  maybe_preempt();
  uint8_t* const to = checked(here(), address, count, "store", where);
  if (address % count != 0) fail(where, "misaligned store");
  write_shared(here(), address, count, plain("store", where));
  std::memcpy(to, bytes, count);
}

void load_shared(uint32_t address, void* bytes, int count, const Where& where) {
  maybe_preempt();
  const uint8_t* const from = checked(here(), address, count, "load", where);
  if (address % count != 0) fail(where, "misaligned load");
  read_shared(here(), address, count, plain("load", where));
  std::memcpy(bytes, from, count);
}

void store_matrices(uint32_t row_address, const uint32_t* fragments, int matrices, bool transposed,
                    const Where& where) {
  uint64_t addresses[32], words[32];
  warp_exchange(~0u, row_address, addresses, where);
  const int lane = self().thread % 32;
  for (int matrix = 0; matrix < matrices; ++matrix) {
    warp_exchange(~0u, fragments[matrix], words, where);
    if (lane / 8 != matrix) continue;
    // This lane writes the row whose address it supplies: elements that eight or four other lanes hold.
    uint16_t row[8];
    for (int i = 0; i < 8; ++i) {
      const int r = transposed ? i : lane % 8, c = transposed ? lane % 8 : i;
      row[i] = static_cast<uint16_t>(words[r * 4 + c / 2] >> (c % 2 * 16));
    }
    const auto address = static_cast<uint32_t>(addresses[lane]);
    if (address % 16 != 0) fail(where, "misaligned stmatrix");
    uint8_t* const to = checked(here(), address, sizeof(row), "stmatrix", where);
    write_shared(here(), address, sizeof(row), plain("stmatrix", where));
    std::memcpy(to, row, sizeof(row));
  }
}

}  // namespace sim
