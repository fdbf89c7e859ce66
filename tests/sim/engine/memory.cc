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
  void* mapping;
  size_t mapped;
};
std::map<uintptr_t, Allocation> allocations;

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
  const size_t mapped = pages + 2 * kPage;
  void* const mapping = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) std::abort();
  auto* const first = static_cast<uint8_t*>(mapping) + kPage;
  mprotect(first, pages, PROT_READ | PROT_WRITE);
  uint8_t* const begin = first + pages - rounded;
  allocations[reinterpret_cast<uintptr_t>(begin)] = {bytes, device, name, mapping, mapped};
  return begin;
}

void free_all() {
  for (const auto& [begin, allocation] : allocations) munmap(allocation.mapping, allocation.mapped);
  allocations.clear();
  stores.clear();
}

void check_global(const void* address, int64_t bytes, const char* what, const Where& where) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  auto found = allocations.upper_bound(begin);
  if (found != allocations.begin()) {
    --found;
    const auto offset = static_cast<int64_t>(begin - found->first);
    if (offset + bytes <= found->second.bytes) return;
    if (offset < found->second.bytes + 65536) {
      report(std::string(what) + " out of bounds: bytes " + std::to_string(offset) + " to " +
                 std::to_string(offset + bytes) + " of the " + std::to_string(found->second.bytes) + " of " +
                 found->second.name + " of rank " + std::to_string(found->second.device),
             machine.running, &where);
    }
  }
  report(std::string(what) + " out of bounds: no such memory", machine.running, &where);
}

void flush_stores(const Cta& cta) {
  std::vector<uintptr_t> mine;
  for (const auto& [address, store] : stores) {
    if (store.cta == &cta) mine.push_back(address);
  }
  for (const uintptr_t address : mine) take_effect(address);
}

void store_relaxed(void* address, const void* bytes, int words) {
  maybe_preempt();
  check_global(address, words * 4, "store", kNowhere);
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

void store_release(uint32_t* address, uint32_t value) {
  maybe_preempt();
  check_global(address, 4, "signal", kNowhere);
  flush_stores(here());
  *address = value;
}

void add_release(uint32_t* address, uint32_t value) {
  maybe_preempt();
  check_global(address, 4, "signal", kNowhere);
  flush_stores(here());
  *address += value;
}

void memory_fence() { flush_stores(here()); }

uint32_t atomic(uint32_t* address, const std::function<uint32_t(uint32_t)>& change) {
  maybe_preempt(/*often=*/true);  // protocols turn on what has happened between a look and an atomic
  const uint32_t old = *address;
  *address = change(old);
  return old;
}

uint64_t timer_ns() {
  self().polls_freely = false;
  return machine.now_ns;
}

int64_t clock_cycles() { return machine.cycles += 20; }

void poll(const void* address, void* bytes, int count, const Where& where) {
  Fiber& fiber = self();
  for (int i = 0; i < count; i += 4) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(address) + static_cast<uintptr_t>(i);
    const auto found = stores.find(at);
    if (found != stores.end() && found->second.cta == fiber.cta) take_effect(at);
  }
  for (;;) {
    std::memcpy(bytes, address, static_cast<size_t>(count));
    Polled* polled = nullptr;
    for (Polled& each : fiber.polled) {
      if (each.address == address && each.bytes == count) polled = &each;
    }
    if (polled == nullptr) {
      polled = &fiber.polled[static_cast<size_t>(fiber.next_polled++ % 4)];
      *polled = {address, count, 0, {}};
      std::memcpy(polled->last, bytes, static_cast<size_t>(count));
      return;
    }
    if (std::memcmp(polled->last, bytes, static_cast<size_t>(count)) != 0) {
      polled->repeats = 0;
      std::memcpy(polled->last, bytes, static_cast<size_t>(count));
      return;
    }
    if (fiber.polls_freely || ++polled->repeats < 2) return;
    // Many turns of a loop may pass while nothing else happens. Loops without an end look at the timer.
    if (machine.config.policy.preempt > 0 && machine.draw(4) == 0) {
      fiber.polls_freely = true;
      return;
    }
    wait_polling(where, [address, last = *static_cast<uint32_t*>(bytes)] {
      return "a change of the word at " + std::to_string(reinterpret_cast<uintptr_t>(address)) +
             ", which is " + std::to_string(last);
    });
    if (fiber.polls_freely) continue;
    std::memcpy(bytes, address, static_cast<size_t>(count));
    return;
  }
}

bool wake_polling() {
  const auto changed = [](Fiber* fiber) {
    bool any = false;
    for (Polled& polled : fiber->polled) {
      if (polled.address == nullptr) continue;
      if (std::memcmp(polled.last, polled.address, static_cast<size_t>(polled.bytes)) == 0) continue;
      std::memcpy(polled.last, polled.address, static_cast<size_t>(polled.bytes));
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
