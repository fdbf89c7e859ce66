// Named barriers, cluster barriers, exchanges in a warp, mbarriers, and the register budget.
#include <cstdio>
#include <cstring>

#include "machine.h"

namespace sim {
namespace {

std::string describe(const MBarrier& barrier, uint32_t address, uint32_t parity) {
  return text("phase ", parity, " of mbarrier ", address, " (in phase ", barrier.phase & 1,
              ", arrivals missing ", barrier.pending, " of ", barrier.count, ", bytes missing ",
              barrier.bytes, ")");
}

void complete(NamedBarrier& barrier) {
  barrier.told = barrier.gathering.told();
  barrier.gathering = {};
  barrier.last_all = barrier.all;
  barrier.all = true;
  barrier.arrived = 0;
  barrier.expected = -1;
  ++barrier.generation;
  barrier.queue.wake_all();
}

// Whether the phase is over; then the next one begins.
void settle(MBarrier& barrier, const Where& where) {
  if (barrier.pending > 0) return;
  if (barrier.bytes < 0)
    fail(where, "more bytes have arrived on an mbarrier than were expected: ", -barrier.bytes, " too many");
  if (barrier.bytes > 0) return;
  barrier.pending = static_cast<int32_t>(barrier.count);
  barrier.told = barrier.gathering.told();
  ++barrier.phase;
  barrier.queue.wake_all();
}

// `orders`: accesses of memory before and behind it; else only what fence.mbarrier_init has shown.
bool meet(NamedBarrier& barrier, int threads, bool condition, bool waits, const char* name,
          const Where& where, bool orders = true) {
  if (barrier.expected >= 0 && barrier.expected != threads) {
    fail(where, "threads disagree on how many meet at ", name, ": ", barrier.expected, " and ", threads);
  }
  barrier.expected = threads;
  barrier.all &= condition;
  Clock& clock = self().clock;
  if (orders) {
    tell(barrier.gathering, clock);
  } else {
    barrier.gathering.all = join(barrier.gathering.all, clock.at_init);
  }
  const uint64_t generation = barrier.generation;
  if (++barrier.arrived >= threads) complete(barrier);
  if (!waits) return true;
  while (barrier.generation == generation) {
    wait_on(barrier.queue, where, [&barrier, name] {
      return text(name, " (", barrier.arrived, " of ", barrier.expected, " threads have arrived)");
    });
  }
  learn(clock, barrier.told);
  return barrier.last_all;
}

}  // namespace

void tell(Gathering& gathering, Clock& clock) {
  gathering.all = join(gathering.all, clock.known);
  gathering.stamps.push_back(clock.stamp());
  ++clock.now;
}

void learn(Clock& clock, const Known& known) { clock.known = join(clock.known, known); }

Past issue_past() {
  Clock& clock = self().clock;
  const Past past = clock;
  ++clock.now;
  return past;
}

void cta_barrier(int id, int threads, bool waits, const Where& where) {
  maybe_preempt();
  Cta& cta = here();
  if (id < 0 || id > 15) fail(where, "no such named barrier");
  const bool everybody = threads == 0;
  if (!everybody && (threads % 32 != 0 || threads > static_cast<int>(cta.fibers.size())))
    fail(where, "a named barrier counts whole warps of the CTA, and not ", threads, " threads");
  meet(cta.named[id], everybody ? cta.live : threads, true, waits,
       everybody ? "__syncthreads" : "a named barrier", where);
}

bool named_barrier_and(int id, int threads, bool condition, const Where& where) {
  maybe_preempt();
  return meet(here().named[id], threads, condition, /*waits=*/true, "a named barrier", where);
}

void cluster_sync_relaxed(const Where& where) {
  maybe_preempt();
  Cta& cta = here();
  int threads = 0;
  for (const Cta* each : cta.cluster->ctas) threads += each != nullptr ? each->live : 0;
  meet(cta.cluster->barrier, threads, true, /*waits=*/true, "the cluster barrier", where, /*orders=*/false);
}

void grid_barrier(const Where& where) {
  maybe_preempt();
  Launch& launch = *here().launch;
  if (!launch.config.cooperative) fail(where, "a grid barrier in a launch that is not cooperative");
  flush_stores(here());
  const int threads = launch.total() * static_cast<int>(launch.config.block.x);
  meet(launch.grid_barrier, threads, true, /*waits=*/true, "the grid barrier", where);
}

// The threads that are left meet without those that have exited.
void leave_barriers(Cta& cta) {
  NamedBarrier& all = cta.named[0];
  if (all.expected == cta.live + 1 && cta.live > 0) {
    all.expected = cta.live;
    if (all.arrived >= cta.live) complete(all);
  }
  NamedBarrier& cluster = cta.cluster->barrier;
  if (cluster.expected > 0) {
    --cluster.expected;
    if (cluster.arrived >= cluster.expected && cluster.arrived > 0) complete(cluster);
  }
}

void warp_exchange(uint32_t mask, uint64_t value, uint64_t (&values)[32], const Where& where, bool orders) {
  Cta& cta = here();
  const int thread = self().thread, lane = thread % 32;
  WarpMeeting& meeting = cta.warps[thread / 32];
  if ((mask >> lane & 1) == 0) fail(where, "a lane meets its warp under a mask without it");
  if (meeting.arrived != 0 && meeting.mask != mask) fail(where, "lanes of a warp disagree on the mask");
  meeting.mask = mask;
  meeting.arrived |= 1u << lane;
  meeting.values[lane] = value;
  Clock& clock = self().clock;
  if (orders) tell(meeting.gathering, clock);
  const uint64_t generation = meeting.generation;
  if (meeting.arrived == mask) {
    std::memcpy(meeting.result, meeting.values, sizeof(meeting.result));
    meeting.told = meeting.gathering.told();
    meeting.gathering = {};
    meeting.arrived = 0;
    ++meeting.generation;
    meeting.queue.wake_all();
  } else {
    while (meeting.generation == generation) {
      wait_on(meeting.queue, where, [&meeting] {
        char text[80];
        std::snprintf(text, sizeof(text), "the lanes %08x of its warp, of which %08x are there", meeting.mask,
                      meeting.arrived);
        return std::string(text);
      });
    }
  }
  std::memcpy(values, meeting.result, sizeof(meeting.result));
  if (orders) learn(clock, meeting.told);
}

bool elect_one(const Where& where) {
  uint64_t values[32];
  warp_exchange(~0u, 0, values, where);
  // Any lane, but the same one in this warp.
  const uint64_t hash =
      (machine.config.policy.seed * 31 + static_cast<uint64_t>(self().thread) / 32) * 0x9E3779B97F4A7C15u;
  return static_cast<uint64_t>(self().thread % 32) == hash >> 59;
}

uint32_t cluster_cta_rank() { return static_cast<uint32_t>(here().rank_in_cluster); }
uint32_t cluster_num_ctas() { return static_cast<uint32_t>(here().launch->config.cluster); }

Cta& cta_of_cluster(int rank, const Where& where) {
  Cta& cta = here();
  if (rank == kThisCta) return cta;
  if (rank >= static_cast<int>(cta.cluster->ctas.size())) fail(where, "no such CTA in the cluster");
  Cta* const other = cta.cluster->ctas[rank];
  if (other == nullptr) fail(where, "access to a CTA of the cluster that has exited");
  return *other;
}

void set_registers(int count, bool grows, const Where& where) {
  Cta& cta = here();
  Fiber& fiber = self();
  if (grows ? count < fiber.registers : count > fiber.registers)
    fail(where, "setmaxnreg from ", fiber.registers, " to ", count);
  while (count - fiber.registers > cta.free_registers) {
    wait_on(cta.registers_freed, where,
            [&cta, count] { return text(count, " registers; the CTA has ", cta.free_registers, " left"); });
  }
  cta.free_registers -= count - fiber.registers;
  fiber.registers = count;
  if (!grows) cta.registers_freed.wake_all();
}

// --- mbarriers ---

MBarrier& barrier_at(Cta& cta, uint32_t bar, const Where& where) {
  checked(cta, bar, 8, "mbarrier access", where);
  const auto found = cta.mbarriers.find(bar);
  if (found == cta.mbarriers.end())
    fail(where, "use of an mbarrier that was not initialised, at shared address ", bar);
  return found->second;
}

MBarrier& known_barrier(Cta& cta, uint32_t bar, const Where& where) {
  MBarrier& barrier = barrier_at(cta, bar, where);
  const Clock& clock = self().clock;
  const bool own = barrier.initialised.actor() == clock.actor && barrier.initialised.slot() == clock.thread;
  if (!own && !covers(clock.known, barrier.initialised) && machine.config.reports_races)
    fail(where, "use of an mbarrier whose initialisation nothing orders before, at shared address ", bar);
  return barrier;
}

void fence_mbarrier_init() {
  Clock& clock = self().clock;
  clock.at_init = with(clock.known, {clock.stamp()});
  ++clock.now;
}

void mbarrier_init(uint32_t bar, uint32_t count, const Where& where) {
  Cta& cta = here();
  checked(cta, bar, 8, "mbarrier", where);
  if (bar % 8 != 0 || count == 0) fail(where, "misaligned mbarrier, or one without arrivals");
  if (cta.mbarriers.contains(bar)) fail(where, "mbarrier initialised twice");
  MBarrier& barrier = cta.mbarriers[bar];
  barrier.count = count;
  barrier.pending = static_cast<int32_t>(count);
  const Clock& clock = self().clock;
  barrier.initialised = Epoch::of(clock.actor, clock.thread, clock.now);
  barrier.slot = new_agent(cta.actor, Agent::kBarrier, static_cast<int>(bar));
  cta.barriers[bar / 8] = true;
}

void arrive(Cta& cta, uint32_t bar, const Where& where) {
  MBarrier& barrier = barrier_at(cta, bar, where);
  --barrier.pending;
  settle(barrier, where);
}

void complete_bytes(Cta& cta, uint32_t bar, int64_t bytes, const Where& where) {
  MBarrier& barrier = barrier_at(cta, bar, where);
  barrier.gathering.stamps.push_back({cta.actor, barrier.slot, barrier.phase + 1, barrier.phase + 1});
  barrier.bytes -= bytes;
  settle(barrier, where);
}

void mbarrier_arrive_expect_tx_cluster(uint32_t bar, uint32_t bytes, int rank, const Where& where) {
  maybe_preempt();
  Cta& cta = cta_of_cluster(rank, where);
  MBarrier& barrier = known_barrier(cta, bar, where);
  Clock& clock = self().clock;
  if (&cta == &here()) {
    barrier.bytes += bytes;
    tell(barrier.gathering, clock);
    arrive(cta, bar, where);
    return;
  }
  // On its way to another CTA, which must not exit before it is there: a relaxed cluster barrier does not wait for it.
  ++cta.in_flight;
  issue_arrival(barrier.queue,
                [&cta, &barrier, bar, bytes, where, known = clock.known, stamp = clock.stamp()] {
                  --cta.in_flight;
                  barrier.bytes += bytes;
                  barrier.gathering.all = join(barrier.gathering.all, known);
                  barrier.gathering.stamps.push_back(stamp);
                  arrive(cta, bar, where);
                });
  ++clock.now;
}

bool mbarrier_test(uint32_t bar, uint32_t parity, const Where& where) {
  MBarrier& barrier = known_barrier(here(), bar, where);
  // A program may spin on it.
  uint32_t phase;
  poll(&barrier.phase, &phase, sizeof(phase), Scope::kDevice, /*acquires=*/false, where);
  const bool done = (barrier.phase & 1) != parity;
  if (done) learn(self().clock, barrier.told);
  return done;
}

void mbarrier_wait(uint32_t bar, uint32_t parity, const Where& where) {
  maybe_preempt();
  MBarrier& barrier = known_barrier(here(), bar, where);
  while ((barrier.phase & 1) == parity) {
    wait_on(barrier.queue, where, [&barrier, bar, parity] { return describe(barrier, bar, parity); });
  }
  learn(self().clock, barrier.told);
}

void check_exit(Cta& cta) {
  for (const auto& [address, barrier] : cta.mbarriers) {
    if (barrier.bytes == 0) continue;
    report(text("the CTA exits with ", barrier.bytes, " bytes missing on mbarrier ", address));
  }
}

}  // namespace sim
