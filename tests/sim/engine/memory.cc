// Global memory: allocations between guard pages, loads that programs spin on, stores whose moment the adversary
// chooses, atomics, time.
#include <execinfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "machine.h"

namespace sim {
namespace {

constexpr uintptr_t kPage = 4096;

struct Allocation {
  int64_t bytes;
  int device;
  std::string name;
};
std::map<uintptr_t, Allocation> allocations;
uint8_t* arena = nullptr;
size_t arena_used = 0;
std::unordered_map<uintptr_t, Told> told;  // by words

// A word that a thread has stored, and that nobody need see yet.
struct Store {
  const Cta* cta;
  Launch* launch;
  uint32_t value;
  uint64_t number;
};
std::unordered_map<uintptr_t, Store> stores;
uint64_t store_number = 0;

void take_effect(uintptr_t address) {
  const auto found = stores.find(address);
  *reinterpret_cast<uint32_t*>(address) = found->second.value;
  Launch* const launch = found->second.launch;
  stores.erase(found);
  --launch->writes_in_flight;
}

void on_fault(int, siginfo_t* info, void*) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  std::fprintf(stderr, "sim: access out of bounds at %p\n", info->si_addr);
  for (const auto& [begin, allocation] : allocations) {
    const int64_t offset = static_cast<int64_t>(address) - static_cast<int64_t>(begin);
    if (offset > -65536 && offset < allocation.bytes + 65536) {
      std::fprintf(stderr, "  byte %lld of the %lld of %s of rank %d\n", static_cast<long long>(offset),
                   static_cast<long long>(allocation.bytes), allocation.name.c_str(), allocation.device);
    }
  }
  if (machine.running != nullptr) std::fprintf(stderr, "  in %s\n", name_of(self()).c_str());
  _exit(3);
}

}  // namespace

void catch_faults() {
  static bool done = false;
  if (done) return;
  done = true;
  stack_t stack = {};
  stack.ss_size = 64 << 10;
  stack.ss_sp = std::malloc(stack.ss_size);
  sigaltstack(&stack, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
}

void* allocate(int64_t bytes, int device, const char* name) {
  const auto rounded = (static_cast<uintptr_t>(bytes) + 15) / 16 * 16;
  const size_t pages = (rounded + kPage - 1) / kPage * kPage;
  if (arena == nullptr) {
    void* const mapping =
        mmap(nullptr, kArenaBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) std::abort();
    arena = static_cast<uint8_t*>(mapping);
    map_shadow(reinterpret_cast<uintptr_t>(arena), kArenaBytes);
  }
  uint8_t* const first = arena + arena_used + kPage;  // behind a page that nobody may access
  arena_used += pages + kPage;
  if (arena_used + kPage > kArenaBytes) std::abort();
  mprotect(first, pages, PROT_READ | PROT_WRITE);
  uint8_t* const begin = first + pages - rounded;
  allocations[reinterpret_cast<uintptr_t>(begin)] = {bytes, device, name};
  return begin;
}

void free_all() {
  if (arena_used > 0) {
    void* const fresh =
        mmap(arena, arena_used, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (fresh != arena) std::abort();
    clear_shadow(reinterpret_cast<uintptr_t>(arena), arena_used);
  }
  arena_used = 0;
  allocations.clear();
  stores.clear();
  told.clear();
}

std::string describe_global(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  auto found = allocations.upper_bound(at);
  if (found == allocations.begin()) return "no allocation";
  --found;
  return text("byte ", at - found->first, " of the ", found->second.bytes, " of ", found->second.name,
              " of rank ", found->second.device);
}

Told& told_at(const void* address) { return told[reinterpret_cast<uintptr_t>(address)]; }
void forget_told(uintptr_t address) { told.erase(address); }
void forget_all_told() { told.clear(); }

void check_global(const void* address, int64_t bytes, const char* what, const Where& where) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  auto found = allocations.upper_bound(begin);
  if (found != allocations.begin()) {
    --found;
    const auto offset = static_cast<int64_t>(begin - found->first);
    if (offset + bytes <= found->second.bytes) return;
    if (offset < found->second.bytes + 65536) {
      fail(where, what, " out of bounds: bytes ", offset, " to ", offset + bytes, " of the ",
           found->second.bytes, " of ", found->second.name, " of rank ", found->second.device);
    }
  }
  fail(where, what, " out of bounds: no such memory");
}

void flush_stores(const Cta& cta) {
  std::vector<uintptr_t> mine;
  for (const auto& [address, store] : stores) {
    if (store.cta == &cta) mine.push_back(address);
  }
  for (const uintptr_t address : mine) take_effect(address);
}

// What the last write of this word has told. To threads of other devices only if it is for all of the system.
static void learn_from(const void* address, Scope scope, bool acquires) {
  Clock& clock = self().clock;
  const int device = here().launch->device->index;
  const auto found = told.find(reinterpret_cast<uintptr_t>(address));
  if (found == told.end()) return;
  const int from = found->second.device;
  if (from != device && (from >= 0 || scope != Scope::kSystem)) return;
  Known& known = acquires ? clock.known : clock.pending;
  known = join(known, found->second.known);
}

// Of a store (`continues`: of an atomic, which also tells what earlier writers have told).
static void tell_at(const void* address, const Known& known, Scope scope, bool continues) {
  const int device = scope == Scope::kSystem ? -1 : here().launch->device->index;
  if (!known) {
    if (!continues) told.erase(reinterpret_cast<uintptr_t>(address));
    return;
  }
  Told& at = told_at(address);
  at = {continues ? join(at.known, known) : known,
        continues && at.known && at.device >= 0 ? at.device : device};
}

void store_relaxed(void* address, const void* bytes, int words, const Where& where) {
  maybe_preempt();
  check_global(address, words * 4, "store", where);
  strong_access(address, words * 4, /*writes=*/true, "store", where);
  tell_at(address, self().clock.at_fence, Scope::kSystem, /*continues=*/false);
  for (int i = 0; i < words; ++i) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(address) + static_cast<uintptr_t>(i) * 4;
    if (stores.contains(at)) take_effect(at);
    Store store = {&here(), here().launch, 0, ++store_number};
    std::memcpy(&store.value, static_cast<const uint8_t*>(bytes) + i * 4, 4);
    ++store.launch->writes_in_flight;
    stores.emplace(at, store);
    issue(false, [at, number = store.number] {
      const auto found = stores.find(at);
      if (found != stores.end() && found->second.number == number) take_effect(at);
    });
  }
}

static void signal(uint32_t* address, uint32_t value, bool adds, const Where& where) {
  maybe_preempt();
  check_global(address, 4, "signal", where);
  flush_stores(here());
  strong_access(address, 4, /*writes=*/true, adds ? "atomic" : "store", where);
  *address = adds ? *address + value : value;
  Clock& clock = self().clock;
  tell_at(address, with(clock.known, {clock.stamp()}), Scope::kSystem, /*continues=*/adds);
  ++clock.now;
}
void store_release_sys(uint32_t* address, uint32_t value, const Where& where) {
  signal(address, value, /*adds=*/false, where);
}
void add_release_sys(uint32_t* address, uint32_t value, const Where& where) {
  signal(address, value, /*adds=*/true, where);
}

void memory_fence() {
  flush_stores(here());
  Clock& clock = self().clock;
  clock.known = join(clock.known, clock.pending);
  clock.pending = {};
  clock.at_fence = with(clock.known, {clock.stamp()});
  ++clock.now;
}

uint32_t atomic(uint32_t* address, const std::function<uint32_t(uint32_t)>& change, const Where& where) {
  maybe_preempt(/*often=*/true);  // protocols turn on what has happened between a look and an atomic
  strong_access(address, 4, /*writes=*/true, "atomic", where);
  const uint32_t old = *address;
  *address = change(old);
  if (is_shared(address)) return old;
  for (Device& device : machine.devices) device.failed |= address == device.failure && *address != 0;
  const Clock& clock = self().clock;
  learn_from(address, Scope::kDevice, /*acquires=*/false);
  tell_at(address, clock.at_fence, Scope::kDevice, /*continues=*/true);
  return old;
}

uint64_t globaltimer_ns() {
  self().polls_freely = false;
  return machine.now_ns;
}

int64_t clock_cycles() { return machine.cycles += 20; }

// A load that the thread may repeat until the value changes.
static void spin(const void* address, void* bytes, int count, const Where& where) {
  Fiber& fiber = self();
  for (int i = 0; i < count; i += 4) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(address) + static_cast<uintptr_t>(i);
    const auto found = stores.find(at);
    if (found != stores.end() && found->second.cta == fiber.cta) take_effect(at);
  }
  for (;;) {
    std::memcpy(bytes, address, count);
    Polled* polled = nullptr;
    for (Polled& each : fiber.polled) {
      if (each.address == address && each.bytes == count) polled = &each;
    }
    if (polled == nullptr) {
      polled = &fiber.polled[fiber.next_polled++ % 4];
      *polled = {address, count, 0, {}};
      std::memcpy(polled->last, bytes, count);
      return;
    }
    if (std::memcmp(polled->last, bytes, count) != 0) {
      polled->repeats = 0;
      std::memcpy(polled->last, bytes, count);
      return;
    }
    if (fiber.polls_freely || ++polled->repeats < 2) return;
    // Many turns of a loop may pass while nothing else happens. Loops without an end look at the timer.
    if (machine.config.policy.preempt > 0 && machine.draw(4) == 0) {
      fiber.polls_freely = true;
      return;
    }
    wait_polling(where, [address, last = *static_cast<uint32_t*>(bytes)] {
      return text("a change of the word at ", reinterpret_cast<uintptr_t>(address), ", which is ", last);
    });
    if (fiber.polls_freely) continue;
    std::memcpy(bytes, address, count);
    return;
  }
}

void poll(const void* address, void* bytes, int count, Scope scope, bool acquires, const Where& where) {
  spin(address, bytes, count, where);
  strong_access(address, count, /*writes=*/false, "load", where);
  learn_from(address, scope, acquires);
}

bool wake_polling() {
  const auto changed = [](Fiber* fiber) {
    bool any = false;
    for (Polled& polled : fiber->polled) {
      if (polled.address == nullptr) continue;
      if (std::memcmp(polled.last, polled.address, polled.bytes) == 0) continue;
      std::memcpy(polled.last, polled.address, polled.bytes);
      polled.repeats = 0;
      any = true;
    }
    return any;
  };
  std::vector<Fiber*> woken;
  std::erase_if(machine.polling, [&](Fiber* fiber) {
    if (!changed(fiber)) return false;
    woken.push_back(fiber);
    return true;
  });
  for (Fiber* fiber : woken) wake(fiber);
  return !woken.empty();
}

}  // namespace sim
