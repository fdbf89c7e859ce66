// Fibers, the order in which they run, the moments at which asynchronous operations take effect, and reports.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "machine.h"

sim::Dim threadIdx, blockIdx, blockDim, gridDim;

// Saves the callee-saved registers on the stack, and continues with another one.
extern "C" void sim_switch(void** save, void* load);
asm(R"(
.text
.globl sim_switch
.type sim_switch, @function
sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size sim_switch, .-sim_switch
)");

namespace sim {

Machine machine;

namespace {

constexpr size_t kStackBytes = 128 << 10;
constexpr uint64_t kCanary = 0x5AFE57ACC0DEull;
constexpr uint64_t kTimeJumpNs = 20'000'000;
constexpr int kMaxJumps = 500;
void* main_stack = nullptr;
std::vector<uint8_t*> free_stacks;
std::vector<Cta*> ready;  // CTAs with a runnable thread; may have repetitions of none

uint8_t* take_stack() {
  if (free_stacks.empty()) {
    constexpr int kMany = 128;
    void* const all =
        mmap(nullptr, kMany * kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) std::abort();
    for (int i = 0; i < kMany; ++i) free_stacks.push_back(static_cast<uint8_t*>(all) + i * kStackBytes);
  }
  uint8_t* const stack = free_stacks.back();
  free_stacks.pop_back();
  return stack;
}

void make_runnable(Fiber* fiber) {
  fiber->state = State::kRunnable;
  if (fiber->cta->runnable.empty()) ready.push_back(fiber->cta);
  fiber->cta->runnable.push_back(fiber);
}

void yield() {
  Fiber* const fiber = machine.running;
  sim_switch(&fiber->stack_pointer, main_stack);
}

[[noreturn]] void fiber_main() {
  here().launch->body();
  self().state = State::kExited;
  yield();
  std::abort();
}

void finish_cta(Cta* cta) {
  check_exit(*cta);
  if (cta->in_flight > 0) {
    report(text("the CTA has exited while ", cta->in_flight,
                " asynchronous operations, or arrivals of other CTAs, still access its shared memory"));
  }
  cta->exited = true;
  forget_shared(*cta);
  cta->cluster->ctas[cta->rank_in_cluster] = nullptr;
  Launch* const launch = cta->launch;
  ++launch->device->free_slots;
  if (!cta->triggered) ++launch->triggered;
  free_slot(cta->slot);
  if (machine.mapped == cta) machine.mapped = nullptr;
  std::erase(ready, cta);
  std::erase_if(machine.ctas, [&](const auto& other) { return other.get() == cta; });
  ++launch->done_ctas;
}

void resume(Fiber* fiber) {
  Cta* const cta = fiber->cta;
  if (machine.mapped != cta) {
    map_shared_memory(*cta);
    machine.mapped = cta;
  }
  machine.running = fiber;
  threadIdx = {static_cast<unsigned>(fiber->thread), 0, 0};
  blockIdx = {static_cast<unsigned>(cta->index), 0, 0};
  blockDim = cta->launch->config.block;
  gridDim = cta->launch->config.grid;
  sim_switch(&main_stack, fiber->stack_pointer);
  if (fiber->state == State::kExited) {
    uint8_t* const stack = static_cast<uint8_t*>(fiber->stack_base);
    if (*reinterpret_cast<uint64_t*>(stack) != kCanary) report("stack overflow of the simulator");
    free_stacks.push_back(stack);
    // The end of a kernel is a fence, as its beginning is.
    Known& at_exit = cta->launch->at_exit;
    at_exit = join(join(at_exit, fiber->clock.known), fiber->clock.pending);
    fiber->clock = {};
    --cta->live;
    leave_barriers(*cta);
    if (cta->live == 0) finish_cta(cta);
  }
  machine.running = nullptr;
}

Fiber* pick() {
  if (ready.empty()) return nullptr;
  const Policy& policy = machine.config.policy;
  // Threads of one CTA run in bursts: a switch of CTAs maps memory.
  size_t at = ready.size() - 1;
  if (policy.order == Policy::Order::kRandom && machine.draw(32) == 0) {
    at = machine.draw(ready.size());
    std::swap(ready[at], ready.back());
  }
  Cta* const cta = ready.back();
  Fiber* fiber;
  if (policy.order == Policy::Order::kLifo) {
    fiber = cta->runnable.back();
    cta->runnable.pop_back();
  } else {
    if (policy.order == Policy::Order::kRandom) {
      std::swap(cta->runnable.front(), cta->runnable[machine.draw(cta->runnable.size())]);
    }
    fiber = cta->runnable.front();
    cta->runnable.pop_front();
  }
  if (cta->runnable.empty()) ready.pop_back();
  return fiber;
}

void deliver(std::vector<std::function<void()>>& operations) {
  const Policy& policy = machine.config.policy;
  // The newest first, mostly: what waits for others is issued again.
  const bool newest = policy.when == Policy::When::kLatest && policy.order == Policy::Order::kLifo;
  if (!newest || machine.draw(4) == 0)
    std::swap(operations[machine.draw(operations.size())], operations.back());
  const std::function<void()> effect = std::move(operations.back());
  operations.pop_back();
  machine.idle_jumps = 0;
  effect();
}

// The same of arrivals. Late ones that nobody waits for are the last.
bool deliver_arrival() {
  auto& arrivals = machine.arrivals;
  if (arrivals.empty()) return false;
  size_t at = machine.draw(arrivals.size());
  for (size_t i = 0; i < arrivals.size() && machine.config.policy.when == Policy::When::kLatest; ++i) {
    if (arrivals[at].first->waiting.empty()) at = (at + 1) % arrivals.size();
  }
  std::swap(arrivals[at], arrivals.back());
  const std::function<void()> effect = std::move(arrivals.back().second);
  arrivals.pop_back();
  machine.idle_jumps = 0;
  effect();
  return true;
}

// Lets one of the operations in flight take effect; whether there was one.
bool deliver_any() {
  std::vector<std::function<void()>>&copies = machine.copies, &wgmmas = machine.wgmmas;
  const Policy& policy = machine.config.policy;
  if (policy.when == Policy::When::kRandom && machine.draw(3) == 0 && deliver_arrival()) return true;
  if (copies.empty() && wgmmas.empty()) return false;
  bool copy = !copies.empty();
  if (!copies.empty() && !wgmmas.empty()) {
    copy = policy.when == Policy::When::kLatest ? policy.wgmma_last : machine.draw(2) == 0;
  }
  deliver(copy ? copies : wgmmas);
  return true;
}

// Whether a thread stands still with its device.
bool freeze(Fiber* fiber) {
  Device& device = *fiber->cta->launch->device;
  if (device.index != machine.config.frozen_rank) return false;
  if (machine.turns_to_freeze > 0 && --machine.turns_to_freeze == 0) device.frozen = true;
  if (device.frozen) machine.frozen.push_back(fiber);
  return device.frozen;
}

bool thaw() {
  if (machine.config.frozen_rank < 0) return false;
  Device& device = machine.devices[machine.config.frozen_rank];
  if (!std::exchange(device.frozen, false)) return false;
  for (Fiber* fiber : machine.frozen) make_runnable(fiber);
  machine.frozen.clear();
  return true;
}

bool release_late_rank() {
  if (machine.config.too_late && !machine.ctas.empty() && machine.draw(3) != 0) return false;
  for (Device& device : machine.devices) {
    if (std::exchange(device.held, false)) return true;
  }
  return false;
}

void print_waiting() {
  std::map<std::string, int> lines;
  for (const auto& cta : machine.ctas) {
    for (const Fiber& fiber : cta->fibers) {
      if (fiber.state != State::kBlocked && fiber.state != State::kPolling) continue;
      ++lines[text(name_of(fiber, /*with_lane=*/false), " waits for ", fiber.reason(), " (",
                   fiber.where.file_name(), ":", fiber.where.line(), ")")];
    }
  }
  int printed = 0;
  for (const auto& [line, count] : lines) {
    if (++printed > 80) break;
    std::fprintf(stderr, "  %s: %d threads\n", line.c_str(), count);
  }
  std::fputs(blocked_streams().c_str(), stderr);
}

[[noreturn]] void end_report() {
  std::fprintf(stderr, "  replay: %s\n", machine.case_name.c_str());
  std::fflush(nullptr);
  _exit(3);
}

[[noreturn]] void report_deadlock() {
  std::fprintf(stderr, "sim: deadlock: no thread can go on, and no operation is in flight\n");
  print_waiting();
  end_report();
}

}  // namespace

Policy policy_of(uint64_t seed) {
  Policy policy;
  if (machine.fixed_policy >= 0) seed = static_cast<uint64_t>(machine.fixed_policy);
  policy.seed = seed;
  policy.when = static_cast<Policy::When>(seed % 3);
  policy.order = static_cast<Policy::Order>(seed / 3 % 3);
  policy.wgmma_last = seed % 2 == 0;
  policy.preempt = seed / 9 % 2 == 0 ? 0 : 40;
  return policy;
}

void WaitQueue::wake_all() {
  if (waiting.empty()) return;
  machine.idle_jumps = 0;
  for (Fiber* fiber : waiting) make_runnable(fiber);
  waiting.clear();
}

void wake(Fiber* fiber) { make_runnable(fiber); }

void reset_machine(const MachineConfig& config) {
  catch_faults();
  reset_streams();
  free_all();
  machine.config = config;
  machine.random.seed(config.policy.seed);
  machine.ctas.clear();
  machine.copies.clear();
  machine.wgmmas.clear();
  machine.arrivals.clear();
  machine.polling.clear();
  machine.sleeping.clear();
  machine.frozen.clear();
  machine.turns_to_freeze = config.frozen_after;
  machine.now_ns = 1'000'000;
  machine.cycles = 0;
  machine.devices.assign(config.devices, {});
  for (int i = 0; i < config.devices; ++i) {
    const int occupied = i == config.occupied_until ? 0 : config.occupied;
    machine.devices[i] = {i, config.resident - occupied, i == config.late_rank};
  }
}

std::string name_of(const Fiber& fiber, bool with_lane) {
  const Cta& cta = *fiber.cta;
  const std::string lane = with_lane ? text(", lane ", fiber.thread % 32) : "";
  return text(cta.launch->name, ", rank ", cta.launch->device->index, ", CTA ", cta.index, ", warp ",
              fiber.thread / 32, lane);
}

void report(const std::string& what, const Fiber* fiber, const Where* where) {
  std::fprintf(stderr, "sim: %s\n", what.c_str());
  if (where != nullptr && where->line() != 0) {
    std::fprintf(stderr, "  at %s:%u\n", where->file_name(), where->line());
  }
  if (fiber != nullptr) std::fprintf(stderr, "  in %s\n", name_of(*fiber).c_str());
  end_report();
}

void wait_on(WaitQueue& queue, const Where& where, std::function<std::string()> reason) {
  Fiber& fiber = self();
  fiber.state = State::kBlocked;
  fiber.where = where;
  fiber.reason = std::move(reason);
  queue.waiting.push_back(&fiber);
  yield();
}

void wait_polling(const Where& where, std::function<std::string()> reason) {
  Fiber& fiber = self();
  fiber.state = State::kPolling;
  fiber.where = where;
  fiber.reason = std::move(reason);
  machine.polling.push_back(&fiber);
  yield();
}

void maybe_preempt(bool often) {
  Fiber& fiber = self();
  for (Polled& polled : fiber.polled) polled.repeats = 0;  // it does more than spin
  const int one_in = machine.config.policy.preempt;
  if (one_in == 0 || machine.draw(often ? 2 : one_in) != 0) return;
  // Of so many preemptions, one lasts until nothing else can happen.
  const int long_sleeps = often ? 2 : 8;
  if (machine.draw(long_sleeps) == 0) {
    machine.sleeping.push_back(&fiber);
  } else {
    make_runnable(&fiber);
  }
  yield();
}

void issue(bool is_wgmma, std::function<void()> effect) {
  if (machine.config.policy.when == Policy::When::kEarliest) {
    effect();
  } else {
    (is_wgmma ? machine.wgmmas : machine.copies).push_back(std::move(effect));
  }
}

void issue_arrival(WaitQueue& queue, std::function<void()> effect) {
  if (machine.config.policy.when == Policy::When::kEarliest) {
    effect();
  } else {
    machine.arrivals.emplace_back(&queue, std::move(effect));
  }
}

void start_cta(Launch* launch, int index, const std::shared_ptr<Cluster>& cluster, int rank_in_cluster) {
  auto owned = std::make_unique<Cta>();
  Cta& cta = *owned;
  machine.ctas.push_back(std::move(owned));
  cta.launch = launch;
  cta.index = index;
  cta.cluster = cluster;
  cta.rank_in_cluster = rank_in_cluster;
  cluster->ctas.push_back(&cta);
  cta.slot = take_slot();
  cta.memory = slot_memory(cta.slot);
  const size_t bytes = dynamic_begin() + launch->config.shared_bytes;
  std::memset(cta.memory, 0xFF, bytes);  // NaN in every floating type
  cta.barriers.assign(bytes / 8 + 1, false);
  const int threads = static_cast<int>(launch->config.block.x);
  const int device = launch->device->index;
  cta.actor =
      new_actor(launch->number, text(launch->name, ", rank ", device, ", CTA ", index), device, threads);
  cta.live = threads;
  cta.warps.resize((threads + 31) / 32);
  cta.tensor_warps.resize(cta.warps.size());
  const int registers = std::min(255, 65536 / threads / 8 * 8);
  cta.free_registers = 65536 - registers * threads;
  cta.fibers = std::vector<Fiber>(threads);
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = cta.fibers[i];
    fiber.cta = &cta;
    fiber.thread = i;
    fiber.clock.known = fiber.clock.at_fence = launch->at_start;
    fiber.clock.actor = cta.actor;
    fiber.clock.thread = i;
    fiber.registers = registers;
    uint8_t* const stack = take_stack();
    fiber.stack_base = stack;
    *reinterpret_cast<uint64_t*>(stack) = kCanary;
    auto** top = reinterpret_cast<void**>(stack + kStackBytes) - 1;  // as if it had been called
    *--top = reinterpret_cast<void*>(fiber_main);
    top -= 6;
    std::memset(top, 0, 6 * sizeof(void*));
    fiber.stack_pointer = top;
    make_runnable(&fiber);
  }
  machine.idle_jumps = 0;
}

void run_all() {
  constexpr size_t kTicks = 64;  // between two looks at streams and, if these are few, at spinning threads
  size_t tick = 0, next_look = 0;
  for (;;) {
    const Policy& policy = machine.config.policy;
    if (tick++ >= next_look) {
      next_look = tick + std::max(kTicks, machine.polling.size());
      advance_streams();
      wake_polling();
    }
    if (policy.when == Policy::When::kRandom && machine.draw(24) == 0) deliver_any();
    if (Fiber* const fiber = pick()) {
      if (!freeze(fiber)) resume(fiber);
    } else if (deliver_any()) {
      continue;
    } else if (advance_streams() || wake_polling()) {
      machine.idle_jumps = 0;
    } else if (!machine.sleeping.empty()) {
      std::swap(machine.sleeping[machine.draw(machine.sleeping.size())], machine.sleeping.back());
      make_runnable(machine.sleeping.back());
      machine.sleeping.pop_back();
    } else if (deliver_arrival()) {
      continue;
    } else if (release_late_rank()) {
      advance_streams();
    } else if (machine.ctas.empty() && streams_empty()) {
      return;
    } else if (!machine.polling.empty() && machine.idle_jumps++ < kMaxJumps) {
      machine.now_ns += kTimeJumpNs;
      for (Fiber* fiber : machine.polling) {
        fiber->polls_freely = true;
        make_runnable(fiber);
      }
      machine.polling.clear();
    } else if (thaw()) {
      machine.idle_jumps = 0;
    } else {
      report_deadlock();
    }
  }
}

}  // namespace sim
